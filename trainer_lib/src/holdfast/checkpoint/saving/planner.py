"""Which rank writes what where, computed once while names, shapes and ranks stay the same. No torch.

Every rank computes the same, so that ranks need not tell each other where their tensors lie; each says how its file
begins, and with that rank 0 sees whether they agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.checkpoint.format.file_names import CheckpointName, tensors_file
from holdfast.checkpoint.format.records import Chunk, Records, TensorRecord
from holdfast.checkpoint.format.shard_layout import (
    Holding,
    Layout,
    Piece,
    ShardPlan,
    Shares,
    TensorSpec,
    divide,
    held_by,
    lay_out,
)

Ownership = Holding | Shares | None
"""How ranks hold it, where not all have all of it."""
_Key = tuple[tuple[TensorSpec, ...], Ownership, int]


class Layouts:
    """The files of all ranks of a world."""

    def __init__(self, specs: Sequence[TensorSpec], holding: Ownership, size: int) -> None:
        self._specs = specs
        self._shares = _shares(specs, holding, size)
        self._layouts: dict[int, Layout] = {}
        self._heads: tuple[int, ...] = ()
        self._records = Records()

    def of(self, rank: int) -> Layout:
        """One rank's share, and its place in the rank's file."""
        if rank not in self._layouts:
            self._layouts[rank] = lay_out(self._shares[rank])
        return self._layouts[rank]

    def plan(self, name: CheckpointName, rank: int) -> ShardPlan:
        """The same for one commit."""
        return self.of(rank).headed({"format": "pt", "commit": str(name), "rank": str(rank)})

    def records(self, headers: Iterable[bytes]) -> Records:
        """Where each tensor lies in the files of all ranks, which begin with these."""
        heads = tuple(map(len, headers))
        if heads != self._heads:
            self._heads, self._records = heads, self._located(heads)
        return self._records

    def _located(self, heads: Sequence[int]) -> Records:
        chunks: dict[str, list[Chunk]] = {spec.name: [] for spec in self._specs}
        for rank, head in enumerate(heads):
            for name, chunk in _chunks(self.of(rank), rank, head):
                chunks[name].append(chunk)
        return Records((spec.name, record_of(spec, chunks[spec.name])) for spec in self._specs)


class Planner:
    """The layouts of the last save, for the next one."""

    def __init__(self) -> None:
        self._key: _Key = ((), None, 0)
        self._layouts: Layouts | None = None

    def layouts(self, specs: Sequence[TensorSpec], holding: Ownership, size: int) -> Layouts:
        """Those of a world of this size."""
        key = (tuple(specs), holding, size)
        if self._layouts is None or key != self._key:
            self._key, self._layouts = key, Layouts(key[0], holding, size)
        return self._layouts


def _chunks(layout: Layout, rank: int, head: int) -> Iterable[tuple[str, Chunk]]:
    file = tensors_file(rank)
    for piece, offset in zip(layout.pieces, layout.offsets, strict=True):
        chunk = Chunk(file=file, offset=head + offset, nbytes=piece.nbytes, start=piece.start, shape=piece.shape)
        yield piece.spec.name, chunk


def record_of(spec: TensorSpec, chunks: Iterable[Chunk]) -> TensorRecord:
    return TensorRecord(
        dtype=spec.dtype, shape=spec.shape, chunks=tuple(sorted(chunks, key=lambda chunk: chunk.start))
    )


def _shares(specs: Sequence[TensorSpec], holding: Ownership, size: int) -> Sequence[Sequence[Piece]]:
    if isinstance(holding, Shares):
        return holding.pieces
    if holding is None:
        return divide(specs, size)
    whole = divide([spec for spec in specs if spec.name not in holding.names], size)
    parts = [spec for spec in specs if spec.name in holding.names]
    return [(*whole[rank], *held_by(parts, holding, rank)) for rank in range(size)]
