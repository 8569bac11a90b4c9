"""The plan of which rank writes what, and where. It is reused while names, shapes and ranks are the same. No torch.

Every rank computes the same plan, so ranks need not exchange the places of their tensors. Each rank sends a digest of
its own layout, with which rank 0 checks that the plans agree.
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
"""How the ranks hold the tensors, if not every rank has all of them."""
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
        """Return the layout of one rank's share in the rank's file."""
        if rank not in self._layouts:
            self._layouts[rank] = lay_out(self._shares[rank])
        return self._layouts[rank]

    def plan(self, name: CheckpointName, rank: int) -> ShardPlan:
        """Return the rank's file for one checkpoint."""
        return self.of(rank).headed({"format": "pt", "commit": str(name), "rank": str(rank)})

    def records(self, headers: Iterable[bytes]) -> Records:
        """Return the places of each tensor in the files of all ranks, which begin with these headers."""
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
    """Keeps the layouts of the last save for the next one."""

    def __init__(self) -> None:
        self._key: _Key = ((), None, 0)
        self._layouts: Layouts | None = None

    def layouts(self, specs: Sequence[TensorSpec], holding: Ownership, size: int) -> Layouts:
        """Return the layouts for a world of this size."""
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
