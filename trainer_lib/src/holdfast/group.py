"""The world of one attempt: who this rank is, and the collectives that it takes part in.

Two groups: one for gradients, and one over gloo for small JSON (checkpoints, agreement), so that a commit never
waits behind a gradient. Every error of a collective becomes PeerLostError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from holdfast.environment import Environment
from holdfast.errors import PeerLostError, UsageError

# Only a bound on waiting for a peer that says nothing at all: launchers end an attempt long before.
COLLECTIVE_TIMEOUT: Final = timedelta(minutes=30)


@contextmanager
def _peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo raises it bare; torch's DistError is one
        raise PeerLostError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


class Group:
    """Collectives over all ranks; a world of one has none to do."""

    def __init__(self, *, rank: int, size: int, device: torch.device, control: dist.ProcessGroup | None) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._control = control

    def sum_(self, tensor: torch.Tensor) -> None:
        """Sum over all ranks, in place, over the training group."""
        if self.size > 1:
            with _peers():
                dist.all_reduce(tensor, op=dist.ReduceOp.SUM)

    def agree_(self, tensor: torch.Tensor) -> None:
        """Maximum over all ranks, in place; a tensor on the CPU."""
        if self.size > 1:
            with _peers():
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control)

    def broadcast_(self, tensor: torch.Tensor) -> None:
        """Rank 0's tensor, in place, over the training group."""
        if self.size > 1:
            with _peers():
                dist.broadcast(tensor, src=0)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order of ranks (`Exchange`)."""
        if self.size == 1:
            return [value]
        data = _pack(value)
        with _peers():
            lengths = torch.zeros(self.size, dtype=torch.int64)
            lengths[self.rank] = data.numel()
            dist.all_reduce(lengths, group=self._control)
            padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
            padded[: data.numel()] = data
            parts = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(parts, padded, group=self._control)
        return [_unpack(part[: int(length)]) for part, length in zip(parts, lengths, strict=True)]

    def share(self, value: Any) -> Any:
        """Rank 0's value (`Exchange`)."""
        if self.size == 1:
            return value
        data = _pack(value) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        with _peers():
            length = torch.tensor([data.numel()], dtype=torch.int64)
            dist.broadcast(length, src=0, group=self._control)
            if self.rank != 0:
                data = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(data, src=0, group=self._control)
        return value if self.rank == 0 else _unpack(data)

    def close(self) -> None:
        """Leave the groups."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _pack(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _unpack(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


def join(environment: Environment, *, timeout: timedelta = COLLECTIVE_TIMEOUT) -> Group:
    """Enter the world that the environment names; one without names is a world of one."""
    device = _device(environment.local_rank)
    if environment.world_size == 1:
        return Group(rank=0, size=1, device=device, control=None)
    if not environment.master_addr:
        raise UsageError("WORLD_SIZE is above 1 and MASTER_ADDR is not set: start the script with 'holdfast run'")
    with _peers():
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, init_method="env://", timeout=timeout)
        control = dist.new_group(backend="gloo", timeout=timeout)
    return Group(rank=dist.get_rank(), size=dist.get_world_size(), device=device, control=_group(control))


def _group(control: Any) -> dist.ProcessGroup:
    if not isinstance(control, dist.ProcessGroup):
        raise UsageError("this rank is not part of the world that it was started for")
    return control


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
