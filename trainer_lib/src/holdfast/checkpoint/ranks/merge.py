"""Merge the state of ranks that hold different parts: shards of tensors, or stages of a pipeline. Pure.

Every rank computes the same result from the reports of all ranks, and so knows what each rank writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from holdfast.checkpoint.format.mapping_order import without_order
from holdfast.checkpoint.format.shard_layout import Piece, Shares, TensorSpec, divide
from holdfast.checkpoint.format.tensor_boxes import Box, tiles
from holdfast.core.errors import StateError
from holdfast.core.json_fields import JsonFields


@dataclass(frozen=True, kw_only=True)
class Part(JsonFields):
    """The part of a tensor that one rank holds: a box, which may be all of the tensor or nothing."""

    spec: TensorSpec
    box: Box

    @property
    def empty(self) -> bool:
        """Whether the tensor has elements, and none of them is on this rank."""
        return 0 in self.box[1] and 0 not in self.spec.shape


@dataclass(frozen=True, kw_only=True)
class RankReport(JsonFields):
    """The objects, tensor parts and mesh of one rank."""

    objects: Mapping[str, Any]
    parts: Mapping[str, Part]
    mesh: Mapping[str, int]
    samples: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Joined:
    objects: Mapping[str, Any]
    specs: Sequence[TensorSpec]
    shares: Shares
    mesh: Mapping[str, int] | None


def join(reports: Sequence[RankReport]) -> Joined:
    """Merge the reports, in order of ranks. Raise `StateError` if they are not consistent."""
    specs = _specs(reports)
    return Joined(
        objects=_objects(reports),
        specs=tuple(specs.values()),
        shares=_assign_shares(specs, reports),
        mesh=_mesh(reports),
    )


def _specs(reports: Sequence[RankReport]) -> dict[str, TensorSpec]:
    found: dict[str, TensorSpec] = {}
    for rank, one in enumerate(reports):
        for name, part in one.parts.items():
            known = found.setdefault(name, part.spec)
            if known != part.spec:
                raise StateError(
                    f"{name} is {part.spec.dtype} of shape {part.spec.shape} on rank {rank}, and "
                    f"{known.dtype} of shape {known.shape} on other ranks: use separate names for different "
                    "tensors"
                )
    return dict(sorted(found.items()))


def _objects(reports: Sequence[RankReport]) -> dict[str, Any]:
    """Return each object as the ranks that have it report it."""
    found: dict[str, tuple[int, Any]] = {}
    for rank, one in enumerate(reports):
        for name, tree in one.objects.items():
            first, known = found.setdefault(name, (rank, tree))
            different = set(tensors_in(known)) ^ set(tensors_in(tree))
            if different:
                raise StateError(
                    f"{name} has other tensors on rank {rank} than on rank {first} ({min(different)}): use a "
                    f"separate name for each pipeline stage, for example save(…, **{{f'stage{{rank}}': module}})"
                )
            if without_order(tree) != without_order(known) or one.samples.get(name) != reports[first].samples.get(
                name
            ):
                raise StateError(
                    f"{name} has another state on rank {rank} than on rank {first}, and one would be lost: use "
                    f"a separate name for the state of each rank, for example save(…, **{{f'{name}{{rank}}': …}})"
                )
    return {name: tree for name, (_, tree) in found.items()}


def tensors_in(tree: Any) -> Iterator[str]:
    """Yield the names of the tensors in a tree."""
    match tree:
        case {"$tensor": str(name)} | {"$array": str(name)} | {"$rows": [str(name), _]}:
            yield name
        case dict():
            for item in tree.values():
                yield from tensors_in(item)
        case list():
            for item in tree:
                yield from tensors_in(item)


def _assign_shares(specs: Mapping[str, TensorSpec], reports: Sequence[RankReport]) -> Shares:
    """Assign the boxes to ranks that hold them, the largest box first, each to the rank with the least to write.

    Tensors that some ranks hold completely are divided among these ranks.
    """
    shares: list[list[Piece]] = [[] for _ in reports]
    loads = [0] * len(reports)
    whole: dict[tuple[int, ...], list[TensorSpec]] = {}
    boxes: list[tuple[Piece, list[int]]] = []
    for name, spec in specs.items():
        holders = _holders(name, reports)
        # a tensor without elements is complete on every rank
        if 0 in spec.shape or list(holders) == [((0,) * len(spec.shape), spec.shape)]:
            whole.setdefault(tuple(sorted(chain(*holders.values()))), []).append(spec)
        elif tiles(spec.shape, holders):
            boxes += [(Piece(spec=spec, start=box[0], shape=box[1]), ranks) for box, ranks in holders.items()]
        else:
            raise StateError(
                f"the parts of {name} do not cover its shape {spec.shape}: ranks have {sorted(holders)}. "
                "Pass all ranks of its mesh, or save part.full_tensor() instead"
            )
    for piece, ranks in sorted(boxes, key=lambda one: (-one[0].nbytes, one[0].spec.name, one[0].start)):
        rank = min(ranks, key=lambda one: (loads[one], one))
        shares[rank].append(piece)
        loads[rank] += piece.nbytes
    for group, many in whole.items():
        for rank, pieces in zip(group, divide(many, len(group)), strict=True):
            shares[rank] += pieces
    return Shares(pieces=tuple(map(tuple, shares)))


def _holders(name: str, reports: Sequence[RankReport]) -> dict[Box, list[int]]:
    found: dict[Box, list[int]] = {}
    for rank, one in enumerate(reports):
        part = one.parts.get(name)
        if part is not None and not part.empty:
            found.setdefault(part.box, []).append(rank)
    return found


def _mesh(reports: Sequence[RankReport]) -> dict[str, int] | None:
    """Return the dimensions of all meshes by name. A dimension of another size under a used name gets a prime."""
    found: dict[str, int] = {}
    for one in reports:
        for name, size in one.mesh.items():
            own = name
            while found.get(own, size) != size:
                own += "'"
            found[own] = size
    return found or None
