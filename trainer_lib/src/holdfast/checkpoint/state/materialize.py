"""What a saved tensor becomes beside a live one: memory for what has none yet, and the part that belongs here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdfast.checkpoint.state.dtensor import is_sharded
from holdfast.core.errors import StateError

Rows = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]


def materialise(module: torch.nn.Module) -> Callable[[], None]:
    """Give what is on the meta device memory, and nothing else: what has numbers keeps them. Returns the way back.

    The tensors stay the same objects, so weights stay tied, and an optimizer that was made of them stays theirs.
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
    """A whole tensor cut as the live one is; whatever else is saved as it is."""
    if not (isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor)):
        return value
    if is_sharded(value) or not is_sharded(live) or value.shape != live.shape:
        return value
    part = rows(value, live.shape)
    return part if is_sharded(part) else _cut(value, live)


def _cut(whole: torch.Tensor, live: Any) -> torch.Tensor:
    """What DTensor's own chunks say is here of it."""
    from torch.distributed.tensor import DTensor

    chunks = live.__create_chunk_list__()
    if len(chunks) != 1:
        raise StateError(f"a tensor of shape {tuple(live.shape)} lies here in {len(chunks)} pieces, and not in one")
    box = tuple(slice(begin, begin + size) for begin, size in zip(chunks[0].offsets, chunks[0].sizes, strict=True))
    part = whole[box].clone().to(live.device)
    return DTensor.from_local(
        part, live.device_mesh, live.placements, run_check=False, shape=live.shape, stride=live.stride()
    )
