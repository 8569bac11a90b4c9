"""Adapt saved tensors to live ones: allocate meta tensors, and select the part that belongs to this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdfast.checkpoint.state.dtensor import is_sharded
from holdfast.core.errors import StateError

Rows = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]


def materialise(module: torch.nn.Module) -> Callable[[], None]:
    """Allocate memory for the meta tensors of a module, and return a function that undoes it.

    Other tensors keep their data. All tensors stay the same objects, so weights stay tied, and optimizers of them
    stay valid.
    """
    every = [*module.parameters(), *module.buffers()]
    real = [one.device for one in every if not one.is_meta]
    device = real[0] if real else torch.get_default_device()
    filled = [(one, _filled(one, device)) for one in every if one.is_meta]

    def swap() -> None:
        for one, other in filled:
            torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]

    swap()
    return swap


def _filled(one: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_like(one, device=device, requires_grad=False)
    return torch.nn.Parameter(made, requires_grad=one.requires_grad) if isinstance(one, torch.nn.Parameter) else made


def placed(value: Any, live: Any, rows: Rows) -> Any:
    """Return the part of a complete tensor that the live one has. Return any other value unchanged."""
    if not (isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor)):
        return value
    if is_sharded(value) or not is_sharded(live) or value.shape != live.shape:
        return value
    part = rows(value, live.shape)
    return part if is_sharded(part) else _cut(value, live)


def _cut(whole: torch.Tensor, live: Any) -> torch.Tensor:
    """Return the part of the tensor that this rank has, according to DTensor's own chunks."""
    from torch.distributed.tensor import DTensor

    chunks = live.__create_chunk_list__()
    if len(chunks) != 1:
        raise StateError(
            f"a tensor of shape {tuple(live.shape)} is in {len(chunks)} pieces on this rank, and not in one"
        )
    box = tuple(slice(begin, begin + size) for begin, size in zip(chunks[0].offsets, chunks[0].sizes, strict=True))
    part = whole[box].clone().to(live.device)
    return DTensor.from_local(
        part, live.device_mesh, live.placements, run_check=False, shape=live.shape, stride=live.stride()
    )
