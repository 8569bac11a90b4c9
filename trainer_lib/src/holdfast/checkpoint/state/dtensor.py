"""Tensors of which this rank may have only a part (DTensors), told without importing torch's whole machinery."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether others hold parts of it."""
    return hasattr(tensor, "device_mesh")


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether all of a sharded tensor's kind is here after all: each rank has a copy, or there is one rank."""
    mesh = getattr(tensor, "device_mesh", None)
    placements = getattr(tensor, "placements", ())
    return mesh is None or all(one.is_replicate() or mesh.size(place) == 1 for place, one in enumerate(placements))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is here: its shard, or all of it."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A tensor whose part here is `part`, sharded as the parameter is."""
    mesh = getattr(parameter, "device_mesh", None)
    return part if mesh is None else sharded(part, mesh, parameter.shape, parameter.stride())


def sharded(part: torch.Tensor, mesh: Any, shape: torch.Size, stride: Sequence[int]) -> torch.Tensor:
    """A tensor of which `part`, rows of it, is here."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=shape, stride=tuple(stride))
