"""The collectives of one attempt. In any of them, a peer may have exited, stopped, or lost its connection.

A group belongs to one attempt and is never repaired: the next attempt creates another one. No default process group
is created, so a script may create its own. Every wait checks a `CancelToken` every 20 ms. Another thread sets the
token when the attempt is over, and the wait then raises `PeerLostError`. All ranks call the same collectives in the
same order, from one thread at a time.

Three properties of gloo determine this design. A timeout of an operation breaks the group, so only the wait has
slices. Destroying a group with a running operation blocks until the operation fails, so a separate thread destroys
abandoned groups. With two running operations, a survivor of three ranks may never detect a loss, because it waits for
another survivor that has already left. Only the `CancelToken` ends such a wait, after a message from the launcher.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from holdfast.core.connections import own_address
from holdfast.core.errors import PeerLostError
from holdfast.core.interpreter import EXIT_SECONDS, start_thread
from holdfast.training.distributed import nccl, torch_internals
from holdfast.training.distributed.blocking_call import SLICE_SECONDS, BlockingCall, peer_lost
from holdfast.training.distributed.cancel_token import CancelToken
from holdfast.training.distributed.torch_internals import PrefixStore, ProcessGroupGloo, Store, TCPStore

SLICE: Final = timedelta(seconds=SLICE_SECONDS)
# Only a limit for a peer that never answers: launchers end an attempt long before.
COLLECTIVE_TIMEOUT: Final = timedelta(minutes=30)


class Pending(Protocol):
    def wait(self) -> None:
        """Wait until the operation is done on this rank.

        Raise `PeerLostError` if it failed or the attempt is over.
        """


class _Done:
    def wait(self) -> None:
        """Return immediately."""


class _GlooPending:
    def __init__(self, work: Any, cancel: CancelToken) -> None:
        self._work = work
        self._cancel = cancel

    def wait(self) -> None:
        began = time.monotonic()
        while True:
            finished = self._work.is_completed()
            try:
                self._work.wait(SLICE)
                return
            except RuntimeError as error:  # raised for a failed operation, and at the end of a slice
                if finished:
                    raise peer_lost(error) from error
            self._cancel.check_since(began)


class _NcclPending:
    def __init__(self, work: nccl.Flight, cancel: CancelToken) -> None:
        self._work = work
        self._cancel = cancel

    def wait(self) -> None:
        began = time.monotonic()
        try:
            while not self._work.landed():
                self._cancel.check_since(began)
        except RuntimeError as error:
            raise peer_lost(error) from error


class Group:
    """All ranks of one attempt: over gloo, and over NCCL for tensors on GPUs if each rank has its own GPU."""

    def __init__(self, *, rank: int, size: int, device: torch.device, cancel: CancelToken, gloo: Any = None) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.cancel = cancel
        self._gloo = gloo
        self._nccl: nccl.Nccl | None = None

    @classmethod
    def single_rank(cls, device: torch.device) -> Group:
        """A world of one rank, without communication."""
        return cls(rank=0, size=1, device=device, cancel=CancelToken())

    @classmethod
    def connect(
        cls,
        *,
        host: str,
        port: int,
        prefix: str,
        rank: int,
        size: int,
        device: torch.device,
        cancel: CancelToken,
        timeout: float,
        interface: str = "",
    ) -> Group:
        """Connect to the other ranks through the store.

        `interface` (gloo's own setting) takes precedence over the route to the store. The prefix must be unused.
        Raise `PeerLostError` if the attempt ends or the time is up before.
        """
        cancel.check()
        if size == 1:
            return cls(rank=rank, size=size, device=device, cancel=cancel)
        place = _Rendezvous(
            host=host, port=port, prefix=prefix, rank=rank, size=size, timeout=timeout, interface=interface
        )
        meet = partial(_meet, place)
        group = cls(
            rank=rank, size=size, device=device, cancel=cancel, gloo=BlockingCall(meet, cancel).result(timeout)
        )
        try:
            if group._own_gpus():
                group._nccl = BlockingCall(partial(_meet_on_gpus, place, device), cancel).result(timeout)
        except PeerLostError:
            group.abandon()
            raise
        return group

    # Asynchronous collectives

    def launch_sum(self, tensor: torch.Tensor) -> Pending:
        """Begin to sum over all ranks, in place."""
        return self._launch_all_reduce(tensor, dist.ReduceOp.SUM)

    def launch_max(self, tensor: torch.Tensor) -> Pending:
        """Begin to take the maximum over all ranks, in place."""
        return self._launch_all_reduce(tensor, dist.ReduceOp.MAX)

    def launch_gather(self, output: torch.Tensor, part: torch.Tensor) -> Pending:
        """Begin to gather every rank's part, in order, into `output`.

        The tensors are flat, and the parts have one length.
        """
        self.cancel.check()
        if self.size == 1:
            output.copy_(part)
            return _Done()
        gpus = self._nccl
        if gpus is not None and part.is_cuda:
            return _NcclPending(_launched(lambda: gpus.all_gather(output, part)), self.cancel)
        return _GlooPending(torch_internals.all_gather(self._pg(), output, part), self.cancel)

    def launch_scatter(self, output: torch.Tensor, parts: torch.Tensor) -> Pending:
        """Begin to sum the `parts` of all ranks. This rank gets its own part of the sum. The tensors are flat."""
        self.cancel.check()
        if self.size == 1:
            output.copy_(parts)
            return _Done()
        gpus = self._nccl
        if gpus is not None and parts.is_cuda:
            return _NcclPending(_launched(lambda: gpus.reduce_scatter(output, parts)), self.cancel)
        return _GlooPending(torch_internals.reduce_scatter(self._pg(), output, parts), self.cancel)

    def launch_send(self, tensors: Sequence[torch.Tensor], to: int, tag: int = 0) -> Pending:
        """Begin to send CPU tensors to one rank. Message n has the tag `tag + n`."""
        return self._launch_on_thread(lambda: [self._pg().send([one], to, tag + n) for n, one in enumerate(tensors)])

    def launch_receive(self, tensors: Sequence[torch.Tensor], frm: int, tag: int = 0) -> Pending:
        """Begin to receive the same number of CPU tensors from one rank, in place."""
        return self._launch_on_thread(lambda: [self._pg().recv([one], frm, tag + n) for n, one in enumerate(tensors)])

    # Blocking collectives

    def sum_(self, tensor: torch.Tensor) -> None:
        """Sum over all ranks, in place."""
        self.launch_sum(tensor).wait()

    def agree_(self, tensor: torch.Tensor) -> None:
        """Compute the maximum over all ranks, in place, for a CPU tensor."""
        self.launch_max(tensor).wait()

    def broadcast_(self, tensor: torch.Tensor, src: int = 0) -> None:
        """Broadcast the tensor of rank `src`, in place. It may have any dtype and layout."""
        if self.size == 1 or tensor.numel() == 0:
            return
        dense = tensor.detach().contiguous()
        self._launch_broadcast(dense.view(-1).view(torch.uint8), src).wait()
        if dense.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(dense)

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> None:
        """Send a CPU tensor to one rank."""
        self.launch_send([tensor], to, tag).wait()

    def receive_(self, tensor: torch.Tensor, frm: int, tag: int = 0) -> None:
        """Receive a CPU tensor from one rank, in place."""
        self.launch_receive([tensor], frm, tag).wait()

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.sum_(torch.zeros(1, device="cpu"))

    # Small JSON (`Exchange`)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in order of ranks."""
        if self.size == 1:
            return [value]
        data = _pack(value)
        lengths = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        lengths[self.rank] = data.numel()
        self.sum_(lengths)
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self.cancel.check()
        _GlooPending(self._pg().allgather([parts], [padded]), self.cancel).wait()
        return [_unpack(part[: int(length)]) for part, length in zip(parts, lengths, strict=True)]

    def share(self, value: Any, src: int = 0) -> Any:
        if self.size == 1:
            return value
        data = _pack(value) if self.rank == src else torch.empty(0, dtype=torch.uint8, device="cpu")
        length = torch.tensor([data.numel()], dtype=torch.int64, device="cpu")
        self.broadcast_(length, src)
        if self.rank != src:
            data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        self.broadcast_(data, src)
        return value if self.rank == src else _unpack(data)

    # Leaving

    def abandon(self) -> None:
        """Leave immediately, without blocking or raising. Running operations may still write to their buffers."""
        self._leave()

    def close(self) -> None:
        """Leave in order, when no operation is running."""
        self._leave().join(EXIT_SECONDS)

    def outlive(self) -> None:
        """Keep the connections open until the process exits, so that its launcher reads the exit code first.

        The interpreter may take seconds to exit. Peers that lose the connection before can only report a lost rank.
        That report would become the root cause of an attempt that the script ended.
        """
        for held in (self._gloo, self._nccl):
            # otherwise the interpreter releases the last reference
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))

    def _leave(self) -> threading.Thread:
        held = [self._gloo, self._nccl]
        if self._nccl is not None:
            self._nccl.lost = True
        self._gloo = self._nccl = None
        return start_thread(_drop, held, name="holdfast-leave")

    # Internal

    def _launch_all_reduce(self, tensor: torch.Tensor, op: Any) -> Pending:
        self.cancel.check()
        if self.size == 1:
            return _Done()
        gpus = self._nccl
        if gpus is not None and tensor.is_cuda:
            return _NcclPending(_launched(lambda: gpus.all_reduce(tensor, op)), self.cancel)
        return _GlooPending(self._pg().allreduce([tensor], op), self.cancel)

    def _launch_broadcast(self, tensor: torch.Tensor, src: int) -> Pending:
        self.cancel.check()
        gpus = self._nccl
        if gpus is not None and tensor.is_cuda:
            return _NcclPending(_launched(lambda: gpus.broadcast(tensor, src)), self.cancel)
        return _GlooPending(self._pg().broadcast([tensor], _broadcast_options(src)), self.cancel)

    def _launch_on_thread(self, launch: Callable[[], list[Any]]) -> Pending:
        """Begin a point-to-point operation on a thread: gloo blocks in the wait, and leaving it early breaks the
        group.
        """
        self.cancel.check()
        return BlockingCall(partial(_wait_for, _launched(launch)), self.cancel)

    def _pg(self) -> Any:
        if self._gloo is None:
            raise PeerLostError("this rank left the group")
        return self._gloo

    def _own_gpus(self) -> bool:
        """Return whether NCCL can be used, which needs one GPU per rank.

        Ranks that share a GPU average over gloo, through the host.
        """
        names = self.gather(nccl.name_of(self.device))
        return all(names) and len(set(names)) == len(names)


@dataclass(frozen=True, kw_only=True)
class _Rendezvous:
    """The parameters of a rank's rendezvous with the others."""

    host: str
    port: int
    prefix: str
    rank: int
    size: int
    timeout: float
    interface: str

    def store(self) -> Store:
        """Return a separate client of the store for this group."""
        return store_client(self.host, self.port, self.prefix, self.timeout)


def store_client(host: str, port: int, prefix: str, timeout: float) -> Store:
    """Return a separate client. A client executes one call at a time, so a waiting call delays all others."""
    limit = timedelta(seconds=timeout)
    client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    return PrefixStore(prefix, client)


def _meet(place: _Rendezvous) -> Any:
    options = torch_internals.gloo_options(COLLECTIVE_TIMEOUT, _devices(place))
    return ProcessGroupGloo(place.store(), place.rank, place.size, options)


def _meet_on_gpus(place: _Rendezvous, device: torch.device) -> nccl.Nccl:
    store = PrefixStore("nccl", place.store())
    return nccl.Nccl.connect(store, rank=place.rank, size=place.size, device=device, timeout=place.timeout)


def _devices(place: _Rendezvous) -> list[Any]:
    """Return the devices on which gloo listens.

    By default, gloo resolves this host's name, which may fail in a pod.
    """
    names = [name for name in place.interface.split(",") if name]
    if names:
        return [ProcessGroupGloo.create_device(interface=name) for name in names]
    return [ProcessGroupGloo.create_device(hostname=own_address(place.host, place.port))]


def _launched(launch: Callable[[], Any]) -> Any:
    """Start a call that checks its connection first. gloo's collectives do not, and raise here for
    an invalid tensor.
    """
    try:
        return launch()
    except RuntimeError as error:
        raise peer_lost(error) from error


def _wait_for(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _broadcast_options(src: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = src
    options.rootTensor = 0
    return options


def _drop(held: list[Any]) -> None:
    time.sleep(SLICE_SECONDS)  # a thread that is launching an operation must not hold the last reference to the group
    for one in held:
        if isinstance(one, nccl.Nccl):
            one.abort()
    held.clear()


def _pack(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _unpack(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
