"""NCCL for gradients, if each rank has its own GPU. Written for `process_group.Group`. It has never run on a GPU.

NCCL differs from gloo in these ways. An aborted operation counts as done, so `lost` is set before any abort and
checked after every operation. Kernels may write until the device is synchronised after the abort. The tensors of
running operations are kept until then, and the next communicator waits for it. Decisions (ballot, vote, rank states)
use gloo. torch's own error handling would end the process, and is switched off only for this communicator.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from holdfast.core.environment import nccl_error_handling_off
from holdfast.training.distributed import torch_internals

POLL: Final = 50e-6
# A lock, because the constructor reads the environment, and an abort must end before the next one begins.
_lock: Final = threading.Lock()


def name_of(device: torch.device) -> str:
    """Return a unique identity of a GPU on any host; empty for other devices, or if torch lacks NCCL."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


class Flight:
    def __init__(self, owner: Nccl, work: Any, tensor: torch.Tensor) -> None:
        self._owner = owner
        self._work = work
        self._tensor = tensor

    def landed(self) -> bool:
        """Return whether the operation is done, after a short sleep if not.

        Raise `RuntimeError` if it failed or was aborted.
        """
        done = self._work.is_completed()
        if self._owner.lost:
            raise RuntimeError("the communicator was aborted")
        if not done:
            time.sleep(POLL)
            return False
        if not self._work.is_success():
            raise RuntimeError("NCCL reported an error")
        self._work.wait()  # the current stream continues after the operation
        self._owner.forget(self._tensor)
        return True


class Nccl:
    """A communicator of one attempt."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.lost = False
        self._group = group
        self._device = device
        self._flying: dict[int, tuple[torch.Tensor, ...]] = {}

    @classmethod
    def connect(cls, store: Any, *, rank: int, size: int, device: torch.device, timeout: float) -> Nccl:
        """Connect to the other ranks, and block while one is missing.

        The first operation creates the communicator.
        """
        with _lock, nccl_error_handling_off():
            torch.cuda.set_device(device)  # each thread has its own current device
            options = torch_internals.nccl_options(timedelta(minutes=30))
            made = cls(dist.ProcessGroupNCCL(store, rank, size, options), device)
        first = made.all_reduce(torch.zeros(1, device=device), dist.ReduceOp.SUM)
        end = time.monotonic() + timeout
        while not first.landed():
            if time.monotonic() > end:
                made.abort()
        return made

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> Flight:
        """Begin to reduce over all ranks, after the work on the current stream."""
        return self._fly(tensor, self._group.allreduce([tensor], op))

    def broadcast(self, tensor: torch.Tensor, src: int) -> Flight:
        """Begin to send rank `src`'s tensor to all."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        return self._fly(tensor, self._group.broadcast([tensor], options))

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> Flight:
        """Begin to collect every rank's part, in order of ranks."""
        return self._fly(output, torch_internals.all_gather(self._group, output, part), part)

    def reduce_scatter(self, output: torch.Tensor, parts: torch.Tensor) -> Flight:
        """Begin to sum over all ranks. Each rank gets its part."""
        return self._fly(output, torch_internals.reduce_scatter(self._group, output, parts), parts)

    def forget(self, tensor: torch.Tensor) -> None:
        """Remove a completed operation."""
        self._flying.pop(id(tensor), None)

    def abort(self) -> None:
        """Abort all running operations, and block until none of them writes any more."""
        self.lost = True
        with _lock:
            self._group.abort()
            torch.cuda.synchronize(self._device)
            self._flying.clear()

    def _fly(self, tensor: torch.Tensor, work: Any, *more: torch.Tensor) -> Flight:
        self._flying[id(tensor)] = (tensor, *more)
        return Flight(self, work, tensor)
