"""Running statistics of normalisation layers.

They are not gradients: all ranks use those of rank 0. They are sent before the vote and applied with the step, so a
step is applied completely or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.modules.batchnorm import _NormBase

from holdfast.training.distributed.process_group import Group


class Statistics:
    """The buffers of all batch-norm layers of some modules."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._layers = [part for module in modules for part in module.modules() if isinstance(part, _NormBase)]

    def collect(self, group: Group) -> torch.Tensor | None:
        """Return rank 0's statistics in double precision, which represents each exactly; None if there are none."""
        buffers = self._buffers()
        if group.size == 1 or not buffers:
            return None
        flat = torch.cat([buffer.detach().reshape(-1).to(torch.float64) for buffer in buffers])
        group.broadcast_(flat, 0)
        return flat

    def take(self, flat: torch.Tensor | None) -> None:
        """Use the given statistics on this rank."""
        offset = 0
        for buffer in self._buffers() if flat is not None else ():
            part = flat[offset : offset + buffer.numel()] if flat is not None else buffer
            buffer.copy_(part.view_as(buffer))
            offset += buffer.numel()

    def _buffers(self) -> list[torch.Tensor]:
        return [buffer for layer in self._layers for buffer in layer.buffers(recurse=False)]
