"""Tensors of which this rank may have only a part (DTensors), detected without importing torch's
distributed modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether other ranks may hold parts of the tensor."""
    return hasattr(tensor, "device_mesh")


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether this rank has all of a tensor: each rank has a copy, or there is one rank."""
    mesh = getattr(tensor, "device_mesh", None)
    placements = getattr(tensor, "placements", ())
    return mesh is None or all(one.is_replicate() or mesh.size(place) == 1 for place, one in enumerate(placements))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor: its shard, or all of it."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose local part is `part`, sharded as the parameter is."""
    mesh = getattr(parameter, "device_mesh", None)
    return part if mesh is None else sharded(part, mesh, parameter.shape, parameter.stride())


def sharded(part: torch.Tensor, mesh: Any, shape: torch.Size, stride: Sequence[int]) -> torch.Tensor:
    """Return a DTensor whose local rows are `part`."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=shape, stride=tuple(stride))
