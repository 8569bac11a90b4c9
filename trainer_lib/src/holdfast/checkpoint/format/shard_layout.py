"""The layout of one rank's tensors as a safetensors file, which is planned before any byte is written. Pure.

The header is padded with spaces so that the data starts at a multiple of 4 KiB. Tensors have no gaps between them.
The tensors with the widest items come first, so that each tensor is aligned to its own item size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from holdfast.core.json_fields import JsonFields

DATA_ALIGNMENT: Final = 4096
# Smaller tensors are not split.
LEAST_CUT_BYTES: Final = 1 << 20
METADATA: Final = "__metadata__"
"""The name of the metadata in a header, which no tensor may have."""
_LENGTH_BYTES: Final = 8

# The bytes of one item, by the dtype names of safetensors.
ITEM_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "BOOL": 1,
        "U8": 1,
        "I8": 1,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "U16": 2,
        "I16": 2,
        "F16": 2,
        "BF16": 2,
        "U32": 4,
        "I32": 4,
        "F32": 4,
        "U64": 8,
        "I64": 8,
        "F64": 8,
        "C64": 8,
    }
)


@dataclass(frozen=True, kw_only=True)
class TensorSpec(JsonFields):
    """A complete tensor: its name, safetensors dtype and global shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The part of a tensor that one file holds: a box, usually of complete rows."""

    spec: TensorSpec
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.spec.dtype] * math.prod(self.shape)

    @property
    def whole(self) -> bool:
        return self.shape == self.spec.shape


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """A file's header, and the offset of each piece from the start of the file."""

    header: bytes
    pieces: tuple[Piece, ...]
    offsets: tuple[int, ...]
    nbytes: int


def whole(spec: TensorSpec) -> Piece:
    return Piece(spec=spec, start=(0,) * len(spec.shape), shape=spec.shape)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The offset of each piece from the end of the header, and the header's table of the pieces."""

    pieces: tuple[Piece, ...]
    offsets: tuple[int, ...]
    nbytes: int
    table: str
    """JSON text without the braces."""

    def headed(self, metadata: Mapping[str, str]) -> ShardPlan:
        """Return the plan of a file with a header that also has this metadata."""
        encoded = json.dumps({METADATA: dict(metadata)}, separators=(",", ":"), ensure_ascii=False)
        header = _padded(f"{encoded[:-1]}{self.table and ','}{self.table}}}".encode())
        return ShardPlan(
            header=header,
            pieces=self.pieces,
            offsets=tuple(len(header) + offset for offset in self.offsets),
            nbytes=len(header) + self.nbytes,
        )


def lay_out(pieces: Iterable[Piece]) -> Layout:
    ordered = sorted(pieces, key=lambda piece: (-ITEM_BYTES[piece.spec.dtype], piece.spec.name))
    table: dict[str, object] = {}
    position, relative = 0, []
    for piece in ordered:
        end = position + piece.nbytes
        table[piece.spec.name] = {
            "dtype": piece.spec.dtype,
            "shape": list(piece.shape),
            "data_offsets": [position, end],
        }
        relative.append(position)
        position = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False)
    return Layout(pieces=tuple(ordered), offsets=tuple(relative), nbytes=position, table=text[1:-1])


def plan_shard(pieces: Iterable[Piece], *, metadata: Mapping[str, str]) -> ShardPlan:
    return lay_out(pieces).headed(metadata)


def _padded(table: bytes) -> bytes:
    total = -(-(_LENGTH_BYTES + len(table)) // DATA_ALIGNMENT) * DATA_ALIGNMENT
    length = total - _LENGTH_BYTES
    return length.to_bytes(_LENGTH_BYTES, "little") + table.ljust(length)


def divide(
    specs: Sequence[TensorSpec], world_size: int, *, least: int = LEAST_CUT_BYTES
) -> tuple[tuple[Piece, ...], ...]:
    """Divide replicated tensors over the ranks, so that each byte is written once and the shares are about equal.

    A tensor that is larger than a rank's fair share (and than `least`) is split by rows. The result depends only on
    the arguments, and not on the order of `specs`. Every rank therefore computes the same result.
    """
    fair = max(least, -(-sum(spec.nbytes for spec in specs) // world_size))
    pieces = [piece for spec in specs for piece in _cut(spec, fair)]
    loads = [0] * world_size
    shares: list[list[Piece]] = [[] for _ in range(world_size)]
    holds: list[set[str]] = [set() for _ in range(world_size)]
    for piece in sorted(pieces, key=lambda p: (-p.nbytes, p.spec.name, p.start)):
        # A file names each tensor only once, so two pieces of a tensor go to different ranks.
        free = (rank for rank in range(world_size) if piece.spec.name not in holds[rank])
        rank = min(free, key=lambda r: (loads[r], r))
        shares[rank].append(piece)
        loads[rank] += piece.nbytes
        holds[rank].add(piece.spec.name)
    return tuple(tuple(share) for share in shares)


@dataclass(frozen=True, kw_only=True)
class Holding:
    """The tensors that are sharded by rows. `shards` has the shard of each rank, in order of ranks."""

    names: frozenset[str]
    size: int
    shards: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The pieces that each rank writes, in order of ranks, if the ranks have different tensors."""

    pieces: tuple[tuple[Piece, ...], ...]


def held_by(specs: Sequence[TensorSpec], holding: Holding, rank: int) -> tuple[Piece, ...]:
    """Return the rows that this rank writes. The ranks with the same shard take turns, tensor by tensor."""
    shard = holding.shards[rank]
    peers = [other for other, one in enumerate(holding.shards) if one == shard]
    own = [
        spec
        for index, spec in enumerate(sorted(specs, key=lambda spec: spec.name))
        if peers[index % len(peers)] == rank
    ]
    cut = [(spec, *rows(spec.shape[0], holding.size, shard)) for spec in own]
    return tuple(
        Piece(spec=spec, start=(begin, *(0 for _ in spec.shape[1:])), shape=(end - begin, *spec.shape[1:]))
        for spec, begin, end in cut
        if end > begin
    )


def rows(length: int, size: int, shard: int) -> tuple[int, int]:
    """Return [begin, end) of a shard along the first dimension, as `torch.chunk` divides it.

    Later shards may be empty.
    """
    step = -(-length // size)
    return min(length, step * shard), min(length, step * (shard + 1))


def _cut(spec: TensorSpec, fair: int) -> list[Piece]:
    parts = -(-spec.nbytes // fair)
    rows = spec.shape[0] if spec.shape else 1
    if parts <= 1 or rows < parts:
        return [whole(spec)]
    edges = [rows * part // parts for part in range(parts + 1)]
    rest = spec.shape[1:]
    return [
        Piece(spec=spec, start=(begin, *(0 for _ in rest)), shape=(end - begin, *rest))
        for begin, end in pairwise(edges)
    ]
