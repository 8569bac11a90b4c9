"""Saving and loading by all ranks of a script's own process group, its DTensors included. Needs gloo."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from holdfast.checkpoint.shard import Holding
from holdfast.errors import StateError


class Together:
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order of ranks."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([data.numel()]), group=self._group)
        padded = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group)
        return [json.loads(bytes(part[: int(n)].numpy())) for part, n in zip(parts, lengths, strict=True)]

    def share(self, value: Any) -> Any:
        """The value of rank 0."""
        return self.gather(value if self.rank == 0 else None)[0]


def mesh_of(parts: Mapping[str, Any]) -> dict[str, int] | None:
    """The names and sizes of the dimensions over which tensors are sharded; None if none is."""
    found: dict[str, int] = {}
    for part in parts.values():
        mesh = part.device_mesh
        names = mesh.mesh_dim_names or [f"dim{number}" for number in range(mesh.ndim)]
        found |= dict(zip(names, mesh.shape, strict=True))
    return found or None


def shard_here(parts: Mapping[str, Any]) -> tuple[int, int]:
    """Into how many shards the tensors are cut, by rows, and which of them is here; (1, 0) if none is."""
    found = {name: _shard_of(name, part) for name, part in parts.items()}
    if len(set(found.values())) > 1:
        raise StateError(f"{min(found)} and others are sharded over different meshes, and only one can be saved")
    return next(iter(found.values()), (1, 0))


def _shard_of(name: str, part: Any) -> tuple[int, int]:
    mesh, cuts = part.device_mesh, [place for place in part.placements if not place.is_replicate()]
    if len(cuts) != 1 or not cuts[0].is_shard(0):
        raise StateError(
            f"{name} is placed as {tuple(part.placements)}, and only tensors that are sharded by rows, along one "
            "dimension of the mesh, can be saved: save part.full_tensor() instead"
        )
    dimension = part.placements.index(cuts[0])
    return mesh.size(dimension), mesh.get_local_rank(dimension)


def holding(parts: Mapping[str, Any], exchange: Together) -> Holding | None:
    """Who has which rows. Every rank calls it."""
    size, shard = shard_here(parts)
    told = exchange.gather([sorted(parts), size, shard])
    if any(other[:2] != told[0][:2] for other in told):
        raise StateError("the ranks of the group hold different sharded tensors: give each rank the same objects")
    return Holding(names=frozenset(parts), size=size, shards=tuple(shard for _, _, shard in told)) if parts else None
