"""The memory of this rank's GPUs."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import torch

from holdfast.training.guards.out_of_memory import nearly_full

_log = logging.getLogger("holdfast.job")
_PERIOD: Final = 50
"""In steps. A look costs about 0.1 ms."""


def empty_caches() -> None:
    """Free the memory of objects in reference cycles, and return what PyTorch has cached to the device."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing before CUDA is used


def free_graph(loss: torch.Tensor) -> None:
    """Free the graph that backward did not free.

    The script may still hold the loss, and the repeated step needs memory.
    """
    with suppress(RuntimeError):  # a view cannot be detached in place
        loss.detach_()


class MemoryWatch:
    """Warns once if a device's memory is nearly full."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._devices = {tensor.device for tensor in tensors if tensor.is_cuda}

    def look(self, step: int) -> None:
        """Look after some of the steps."""
        if self._devices and step % _PERIOD == 0:
            self._look()

    def _look(self) -> None:
        for device in self._devices:
            text = nearly_full(
                allocated=torch.cuda.max_memory_allocated(device),
                reserved=torch.cuda.max_memory_reserved(device),
                total=torch.cuda.get_device_properties(device).total_memory,
            )
            if text:
                _log.warning("%s: %s", device, text)
                self._devices = set()
                return
