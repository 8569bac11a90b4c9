"""The exchange over a script's own process group, with which all its ranks save and load. Requires gloo."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from holdfast.checkpoint.format.tensor_boxes import Box
from holdfast.checkpoint.ranks.exchange import Exchange
from holdfast.checkpoint.ranks.merge import Joined, Part, RankReport, join
from holdfast.checkpoint.state.flatten import Flat
from holdfast.core.errors import PeerLostError, StateError, UsageError


class ProcessGroupExchange:
    """An exchange over the ranks of a process group. Raise `UsageError` if it has no backend for CPU tensors."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        try:
            group._get_backend(torch.device("cpu"))
        except RuntimeError:
            raise UsageError(
                f"group= has the backend {dist.get_backend(group)!r}, which does not support CPU tensors: "
                'pass torch.distributed.new_group(backend="gloo")'
            ) from None

    def share(self, value: Any) -> Any:
        return self.gather(value if self.rank == 0 else None)[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in order of ranks. Raise `PeerLostError` if a rank is lost."""
        try:
            return self._gather(value)
        except RuntimeError as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise PeerLostError(
                f"a rank of group= is lost, or did not answer within the group's time limit ({first}). "
                "Start all ranks again. No incomplete checkpoint is left behind"
            ) from error

    def _gather(self, value: Any) -> list[Any]:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([data.numel()], device="cpu"), group=self._group)
        padded = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group)
        return [json.loads(bytes(part[: int(n)].numpy())) for part, n in zip(parts, lengths, strict=True)]


def ranks() -> int:
    """Return the number of ranks of the script's default process group; 1 if there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def joined(flat: Flat, exchange: Exchange, samples: Mapping[str, str]) -> Joined:
    """Combine the state of all ranks, and decide which rank writes which part. Every rank calls it."""
    own = RankReport(objects=flat.tree, parts=_parts(flat), mesh=_mesh_of(flat.parts), samples=samples).to_json()
    digests = exchange.gather(xxhash.xxh3_128_hexdigest(json.dumps(own, sort_keys=True).encode()))
    reports = exchange.gather(own) if len(set(digests)) > 1 else [own] * exchange.size
    return join([RankReport.from_json(one) for one in reports])


def _parts(flat: Flat) -> dict[str, Part]:
    return {
        spec.name: Part(spec=spec, box=_box(spec.name, flat.parts[spec.name]))
        if spec.name in flat.parts
        else Part(spec=spec, box=((0,) * len(spec.shape), spec.shape))
        for spec in flat.specs
    }


def _box(name: str, part: Any) -> Box:
    """Return the box of a DTensor that this rank has."""
    advice = "save part.full_tensor() instead"
    if any(place.is_partial() for place in part.placements):
        raise StateError(f"{name} is placed as {tuple(part.placements)}, a sum that is not computed yet: {advice}")
    chunks = part.__create_chunk_list__()
    if len(chunks) > 1:
        raise StateError(f"{name} is in {len(chunks)} pieces on this rank, and not in one box: {advice}")
    if not chunks or 0 in chunks[0].sizes:
        return (0,) * part.dim(), (0,) * part.dim()
    return tuple(chunks[0].offsets), tuple(chunks[0].sizes)


def _mesh_of(parts: Mapping[str, Any]) -> dict[str, int]:
    """Return the names and sizes of the mesh dimensions over which tensors are sharded."""
    found: dict[str, int] = {}
    for part in parts.values():
        mesh = part.device_mesh
        names = mesh.mesh_dim_names or [f"dim{number}" for number in range(mesh.ndim)]
        found |= dict(zip(names, mesh.shape, strict=True))
    return found
