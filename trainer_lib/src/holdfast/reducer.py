"""Averaging gradients over the ranks of a world, in flat buckets launched in one fixed order.

Gradients arrive already weighted by samples, so their sum over all micro-batches of all ranks is the mean over the
global batch, however unevenly it was shared out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch

BUCKET_BYTES: Final = 25 << 20


class Reducer:
    """Sums the gradients of some parameters over all ranks."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], sum_: Callable[[torch.Tensor], None]) -> None:
        self.parameters = tuple(dict.fromkeys(p for p in parameters if p.requires_grad))
        self._sum = sum_
        self._buckets = _buckets(self.parameters)

    def touched(self) -> list[bool]:
        """Which parameters have a gradient on this rank."""
        return [parameter.grad is not None for parameter in self.parameters]

    def reduce(self) -> None:
        """Replace every gradient by its sum over the ranks; a missing one counts as zero."""
        for bucket in self._buckets:
            flat = torch.cat([_flat_gradient(parameter) for parameter in bucket])
            self._sum(flat)
            _scatter(flat, bucket)

    def scale(self, factor: float) -> None:
        """Multiply every gradient."""
        for gradient in self._gradients():
            gradient.mul_(factor)

    def drop(self, kept: Sequence[bool]) -> None:
        """Take the gradient away where no rank had one, so that the optimizer passes such parameters by."""
        for parameter, keep in zip(self.parameters, kept, strict=True):
            if not keep:
                parameter.grad = None

    def clear(self) -> None:
        """No gradients: before the next global batch."""
        for parameter in self.parameters:
            parameter.grad = None

    def norm(self) -> torch.Tensor:
        """The norm of all gradients together; the same on every rank, since the gradients are."""
        return torch.nn.utils.get_total_norm(self._gradients())

    def clip(self, limit: float, norm: float) -> None:
        """Scale the gradients so that their norm is at most `limit`."""
        if norm > limit:
            self.scale(limit / norm)

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """In reverse order, as backward makes them; of one dtype and device each, and of bounded size."""
    open_: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    filled: list[list[torch.nn.Parameter]] = []
    for parameter in reversed(parameters):
        key = (parameter.dtype, parameter.device)
        bucket = open_.setdefault(key, [])
        bucket.append(parameter)
        if sum(p.numel() * p.element_size() for p in bucket) >= BUCKET_BYTES:
            filled.append(open_.pop(key))
    return filled + list(open_.values())


def _flat_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    return parameter.grad.detach().reshape(-1)


def _scatter(flat: torch.Tensor, bucket: Sequence[torch.nn.Parameter]) -> None:
    offset = 0
    for parameter in bucket:
        part = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
        if parameter.grad is None:
            parameter.grad = part.clone()
        else:
            parameter.grad.copy_(part)
