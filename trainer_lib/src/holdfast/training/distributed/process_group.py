"""The collectives of one attempt, in any of which a peer may be dead, stopped, asleep or cut off.

A group belongs to one attempt and is never repaired: the next attempt makes another. No default process group is
made, so a script may make its own. Every wait takes slices of 20 ms alongside a `CancelToken`, which another thread
sets when the attempt is over, and then ends in PeerLostError. All ranks call the same collectives in the same order,
from one thread at a time.

Three facts of gloo shape this module. An operation's timeout ruins the group for all that follows, so only the
waiting is sliced. Destroying a group with an operation in flight blocks until that operation fails, so a group is
abandoned to a thread of its own. And with two operations in flight a survivor of three may never see a loss: it
waits for another, which saw it and left. Only `CancelToken` ends that, set by the launcher's word.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import math
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from holdfast.core.errors import PeerLostError
from holdfast.training.distributed import nccl

SLICE: Final = timedelta(milliseconds=20)
# Only a bound on waiting for a peer that says nothing at all: launchers end an attempt long before.
COLLECTIVE_TIMEOUT: Final = timedelta(minutes=30)
# How long an orderly end waits for its sockets to be closed.
CLOSING: Final = 1.0
_threads: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()


class CancelToken:
    """'This attempt is over', said by any thread and asked in every wait. The first reason stays."""

    def __init__(self) -> None:
        self._said: list[str] = []
        self.waited: Callable[[float], None] | None = None
        """Asked in each slice of a wait, with the seconds that it has lasted; may raise."""

    def set(self, reason: str) -> None:
        """End the attempt for everyone who waits in it."""
        self._said.append(reason)

    def is_set(self) -> bool:
        """Whether the attempt is over."""
        return bool(self._said)

    @property
    def reason(self) -> str:
        """Why; empty while it is not."""
        return self._said[0] if self._said else ""

    def check(self) -> None:
        """Raise PeerLostError if the attempt is over."""
        if self._said:
            raise PeerLostError(f"the attempt is over: {self._said[0]}")

    def check_since(self, began: float) -> None:
        """The same in a wait that began then."""
        self.check()
        if self.waited is not None:
            self.waited(time.monotonic() - began)


class Pending(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Until it is done on this rank; PeerLostError if it failed or the attempt is over."""


class _Done:
    def wait(self) -> None:
        """Nothing to wait for."""


class _GlooPending:
    def __init__(self, work: Any, over: CancelToken) -> None:
        self._work = work
        self._over = over

    def wait(self) -> None:
        began = time.monotonic()
        while True:
            finished = self._work.is_completed()
            try:
                self._work.wait(SLICE)
                return
            except RuntimeError as error:  # of an operation that failed, and of a slice that ended
                if finished:
                    raise lost(error) from error
            self._over.check_since(began)


class _NcclPending:
    def __init__(self, work: nccl.Flight, over: CancelToken) -> None:
        self._work = work
        self._over = over

    def wait(self) -> None:
        began = time.monotonic()
        try:
            while not self._work.landed():
                self._over.check_since(began)
        except RuntimeError as error:
            raise lost(error) from error


class Group:
    """All ranks of one attempt: over gloo, and over NCCL for tensors on GPUs where each rank has one of its own."""

    def __init__(self, *, rank: int, size: int, device: torch.device, over: CancelToken, gloo: Any = None) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.over = over
        self._gloo = gloo
        self._nccl: nccl.Nccl | None = None

    @classmethod
    def alone(cls, device: torch.device) -> Group:
        """A world of one: nothing to send, nobody to lose."""
        return cls(rank=0, size=1, device=device, over=CancelToken())

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
        over: CancelToken,
        timeout: float,
        interface: str = "",
    ) -> Group:
        """Meet the other ranks through the store; `interface` (gloo's own setting) wins over the route to the store.

        Nobody else may ever have used the prefix. PeerLostError if the attempt ends or the time is up before all met.
        """
        over.check()
        if size == 1:
            return cls(rank=rank, size=size, device=device, over=over)
        place = _Rendezvous(
            host=host, port=port, prefix=prefix, rank=rank, size=size, timeout=timeout, interface=interface
        )
        meet = partial(_meet, place)
        group = cls(rank=rank, size=size, device=device, over=over, gloo=_Aside(meet, over).result(timeout))
        try:
            if group._own_gpus():
                group._nccl = _Aside(partial(_meet_on_gpus, place, device), over).result(timeout)
        except PeerLostError:
            group.abandon()
            raise
        return group

    # Collectives that go on while the caller does something else

    def launch_sum(self, tensor: torch.Tensor) -> Pending:
        """Begin to sum over all ranks, in place."""
        return self._launch_all_reduce(tensor, dist.ReduceOp.SUM)

    def launch_max(self, tensor: torch.Tensor) -> Pending:
        """Begin to take the maximum over all ranks, in place."""
        return self._launch_all_reduce(tensor, dist.ReduceOp.MAX)

    def launch_gather(self, output: torch.Tensor, part: torch.Tensor) -> Pending:
        """Begin to put every rank's part, in order of ranks, into `output`; flat tensors, all parts of one length."""
        self.over.check()
        if self.size == 1:
            output.copy_(part)
            return _Done()
        gpus = self._nccl
        if gpus is not None and part.is_cuda:
            return _NcclPending(_launched(lambda: gpus.all_gather(output, part)), self.over)
        return _GlooPending(self._pg()._allgather_base(output, part), self.over)

    def launch_scatter(self, output: torch.Tensor, parts: torch.Tensor) -> Pending:
        """Begin to sum all ranks' `parts`, of which this rank gets its own; flat tensors."""
        self.over.check()
        if self.size == 1:
            output.copy_(parts)
            return _Done()
        gpus = self._nccl
        if gpus is not None and parts.is_cuda:
            return _NcclPending(_launched(lambda: gpus.reduce_scatter(output, parts)), self.over)
        return _GlooPending(self._pg()._reduce_scatter_base(output, parts), self.over)

    def launch_send(self, tensors: Sequence[torch.Tensor], to: int, tag: int = 0) -> Pending:
        """Begin to send tensors on the CPU to one rank; the nth message has tag + n."""
        return self._launch_aside(lambda: [self._pg().send([one], to, tag + n) for n, one in enumerate(tensors)])

    def launch_receive(self, tensors: Sequence[torch.Tensor], frm: int, tag: int = 0) -> Pending:
        """Begin to receive as many from one rank, in place."""
        return self._launch_aside(lambda: [self._pg().recv([one], frm, tag + n) for n, one in enumerate(tensors)])

    # Collectives that are waited for

    def sum_(self, tensor: torch.Tensor) -> None:
        """Sum over all ranks, in place."""
        self.launch_sum(tensor).wait()

    def agree_(self, tensor: torch.Tensor) -> None:
        """Maximum over all ranks, in place; a tensor on the CPU."""
        self.launch_max(tensor).wait()

    def broadcast_(self, tensor: torch.Tensor, src: int = 0) -> None:
        """The tensor of rank `src`, in place; of any type and layout."""
        if self.size == 1 or tensor.numel() == 0:
            return
        dense = tensor.detach().contiguous()
        self._launch_broadcast(dense.view(-1).view(torch.uint8), src).wait()
        if dense.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(dense)

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> None:
        """Send a tensor on the CPU to one rank."""
        self.launch_send([tensor], to, tag).wait()

    def receive_(self, tensor: torch.Tensor, frm: int, tag: int = 0) -> None:
        """Receive a tensor on the CPU from one rank, in place."""
        self.launch_receive([tensor], frm, tag).wait()

    def barrier(self) -> None:
        """Until every rank is here."""
        self.sum_(torch.zeros(1, device="cpu"))

    # Small JSON (`Exchange`)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order of ranks."""
        if self.size == 1:
            return [value]
        data = _pack(value)
        lengths = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        lengths[self.rank] = data.numel()
        self.sum_(lengths)
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self.over.check()
        _GlooPending(self._pg().allgather([parts], [padded]), self.over).wait()
        return [_unpack(part[: int(length)]) for part, length in zip(parts, lengths, strict=True)]

    def share(self, value: Any, src: int = 0) -> Any:
        """The value of rank `src`."""
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
        """Leave at once, never blocking, never raising. Buffers of what is in flight may still be written."""
        self._leave()

    def close(self) -> None:
        """Leave in order, when nothing is in flight."""
        self._leave().join(CLOSING)

    def outlive(self) -> None:
        """Never close the connections: they end with the process, when its launcher sees how it ended.

        An interpreter takes up to seconds to end. Peers that miss this rank before that have nothing to say but that
        it is lost, and that would stand as the root of an attempt that the script ended.
        """
        for held in (self._gloo, self._nccl):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))  # a last reference would go with the interpreter

    def _leave(self) -> threading.Thread:
        held = [self._gloo, self._nccl]
        if self._nccl is not None:
            self._nccl.lost = True
        self._gloo = self._nccl = None
        return aside(_drop, held)

    # Inside

    def _launch_all_reduce(self, tensor: torch.Tensor, op: Any) -> Pending:
        self.over.check()
        if self.size == 1:
            return _Done()
        gpus = self._nccl
        if gpus is not None and tensor.is_cuda:
            return _NcclPending(_launched(lambda: gpus.all_reduce(tensor, op)), self.over)
        return _GlooPending(self._pg().allreduce([tensor], op), self.over)

    def _launch_broadcast(self, tensor: torch.Tensor, src: int) -> Pending:
        self.over.check()
        gpus = self._nccl
        if gpus is not None and tensor.is_cuda:
            return _NcclPending(_launched(lambda: gpus.broadcast(tensor, src)), self.over)
        return _GlooPending(self._pg().broadcast([tensor], _broadcast_options(src)), self.over)

    def _launch_aside(self, launch: Callable[[], list[Any]]) -> Pending:
        """Point to point: gloo blocks in the wait, and to leave that wait early ruins the group."""
        self.over.check()
        return _Aside(partial(_wait_for, _launched(launch)), self.over)

    def _pg(self) -> Any:
        if self._gloo is None:
            raise PeerLostError("this rank left the group")
        return self._gloo

    def _own_gpus(self) -> bool:
        """NCCL wants a GPU for each rank; ranks that share one average over gloo, through the host."""
        names = self.gather(nccl.name_of(self.device))
        return all(names) and len(set(names)) == len(names)


class _Aside:
    """Something that blocks, on a thread of its own. If the attempt ends first, its result dies there."""

    def __init__(self, action: Callable[[], Any], over: CancelToken) -> None:
        self._over = over
        self._outcome: dict[str, Any] = {}
        self._done = threading.Event()
        aside(_run, action, self._outcome, self._done)

    def wait(self) -> None:
        self.result()

    def result(self, timeout: float | None = None) -> Any:
        """What the action returned; PeerLostError if it failed, the time is up or the attempt is over."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self._done.wait(SLICE.total_seconds()):
            self._over.check()
            if time.monotonic() > end:
                raise PeerLostError(f"the ranks did not all meet within {timeout:g} s")
        error = self._outcome.pop("error", None)
        if isinstance(error, RuntimeError | OSError):
            raise lost(error) from error
        if error is not None:
            raise error
        return self._outcome.pop("value")


def unless_over(action: Callable[[], Any], over: CancelToken) -> Any:
    """What the action returns; PeerLostError if it fails, or the attempt ends first."""
    return _Aside(action, over).result()


def aside(target: Callable[..., None], *args: Any) -> threading.Thread:
    """A thread for what may block for ever in the library, which must not keep the process from ending."""
    thread = threading.Thread(target=target, args=args, name="holdfast-aside", daemon=True)
    thread.start()
    _threads.add(thread)
    return thread


@atexit.register
def _settle() -> None:
    """A thread that returns from the library while the interpreter ends would abort the process: wait for most."""
    end = time.monotonic() + CLOSING
    for thread in tuple(_threads):
        thread.join(max(0.0, end - time.monotonic()))


def _run(action: Callable[[], Any], outcome: dict[str, Any], done: threading.Event) -> None:
    try:
        outcome["value"] = action()
    except Exception as error:  # noqa: BLE001 - carried over to the thread that waits
        outcome["error"] = error
    finally:
        done.set()


def lost(error: BaseException) -> PeerLostError:
    """The library's error in one line of ours."""
    lines = str(error).splitlines()
    return PeerLostError(lines[0] if lines else type(error).__name__)


@dataclass(frozen=True, kw_only=True)
class _Rendezvous:
    """Where a rank of a world meets the others."""

    host: str
    port: int
    prefix: str
    rank: int
    size: int
    timeout: float
    interface: str

    def store(self) -> Store:
        """A client of this group's own."""
        return store_client(self.host, self.port, self.prefix, self.timeout)


def store_client(host: str, port: int, prefix: str, timeout: float) -> Store:
    """A client of its own: a client does one call at a time, and one that waits holds up all others."""
    patience = timedelta(seconds=timeout)
    client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)
    return PrefixStore(prefix, client)


def _meet(place: _Rendezvous) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = COLLECTIVE_TIMEOUT
    options._devices = _devices(place)
    return ProcessGroupGloo(place.store(), place.rank, place.size, options)


def _meet_on_gpus(place: _Rendezvous, device: torch.device) -> nccl.Nccl:
    store = PrefixStore("nccl", place.store())
    return nccl.Nccl.connect(store, rank=place.rank, size=place.size, device=device, timeout=place.timeout)


def _devices(place: _Rendezvous) -> list[Any]:
    """Where gloo listens. Left to itself it asks for this host's name, which a pod may be unable to resolve."""
    names = [name for name in place.interface.split(",") if name]
    if names:
        return [ProcessGroupGloo.create_device(interface=name) for name in names]
    return [ProcessGroupGloo.create_device(hostname=address_towards(place.host, place.port))]


def address_towards(host: str, port: int) -> str:
    """This host's own address on the way to another; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _launched(launch: Callable[[], Any]) -> Any:
    """Start what looks at its connection first; gloo's collectives do not, and raise here for a wrong tensor."""
    try:
        return launch()
    except RuntimeError as error:
        raise lost(error) from error


def _wait_for(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _broadcast_options(src: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = src
    options.rootTensor = 0
    return options


def _drop(held: list[Any]) -> None:
    time.sleep(SLICE.total_seconds())  # whoever is just launching must not be the last to hold the group
    for one in held:
        if isinstance(one, nccl.Nccl):
            one.abort()
    held.clear()


def _pack(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _unpack(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
