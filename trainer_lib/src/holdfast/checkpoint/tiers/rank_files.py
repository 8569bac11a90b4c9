"""One rank's files of a checkpoint, copied into a slot and digested at the same time. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import xxhash

from holdfast.checkpoint.format.file_names import rank_file, tensors_file
from holdfast.checkpoint.format.mapping_order import has_order
from holdfast.checkpoint.format.records import CHUNK_BYTES, Chunk, FileRecord
from holdfast.checkpoint.format.shard_layout import LEAST_CUT_BYTES, Piece
from holdfast.checkpoint.io.chunk_digester import ChunkDigester
from holdfast.checkpoint.io.durable_files import encode_json
from holdfast.checkpoint.io.thread_pool import Pool
from holdfast.checkpoint.ranks.exchange import Exchange
from holdfast.checkpoint.saving.finite_check import Inspection
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.saving.stager import Staged
from holdfast.checkpoint.stores.memory.peer_client import space_for
from holdfast.checkpoint.stores.memory.slot_writer import SlotWriter

_MANIFEST_BASE: Final = 64 << 10
# The bytes that are copied before another thread begins to digest them.
_BATCH_BYTES: Final = 4 * CHUNK_BYTES


class RankFiles:
    """One rank's files of a checkpoint, in the form in which a slot holds them."""

    def __init__(self, staged: Staged, exchange: Exchange) -> None:
        self.snapshot = snapshot = staged.snapshot
        self._rank = exchange.rank
        self._plan = staged.plan
        self._per_rank = encode_json(snapshot.per_rank)
        state = encode_json(snapshot.state)
        self.order = _order(snapshot.state, state)
        self.room = space_for(
            [self._plan.nbytes, len(self._per_rank)], _manifest_bound(snapshot, exchange.size, len(state))
        )

    @property
    def chunks(self) -> dict[str, tuple[Chunk, ...]]:
        file, plan = tensors_file(self._rank), self._plan
        return {
            piece.spec.name: (
                Chunk(file=file, offset=offset, nbytes=piece.nbytes, start=piece.start, shape=piece.shape),
            )
            for piece, offset in zip(plan.pieces, plan.offsets, strict=True)
        }

    def write(self, writer: SlotWriter) -> dict[str, FileRecord]:
        tensors, own = tensors_file(self._rank), rank_file(self._rank)
        image = writer.buffer(tensors, self._plan.nbytes)
        return {
            tensors: self._copied(image),
            own: writer.write(own, [self._per_rank], len(self._per_rank)),
        }

    def _copied(self, image: memoryview) -> FileRecord:
        """Copy the tensors, while another thread computes the digests."""
        plan = self._plan
        digests = ChunkDigester(Inspection(plan, self.snapshot.weights).update)
        image[: len(plan.header)] = plan.header
        if plan.nbytes <= CHUNK_BYTES:
            self.snapshot.copy([(piece, view) for piece, view, _ in self._places(image)])
            digests.update(image)
            return digests.record()
        with Pool(1, "holdfast-digest") as behind:
            begun = []
            for batch, end in _batches(self._places(image)):
                self.snapshot.copy(batch)
                begun.append(behind.submit(digests.follow, image, end))
            for digested in begun:
                digested.result()
        return digests.record()

    def _places(self, image: memoryview) -> Iterator[tuple[Piece, memoryview, int]]:
        """Yield the pieces in order, each with its buffer and its end."""
        for piece, offset in zip(self._plan.pieces, self._plan.offsets, strict=True):
            end = offset + piece.nbytes
            yield piece, image[offset:end], end


def _batches(
    places: Iterator[tuple[Piece, memoryview, int]],
) -> Iterator[tuple[list[tuple[Piece, memoryview]], int]]:
    batch: list[tuple[Piece, memoryview]] = []
    nbytes = reached = 0
    for piece, view, end in places:
        batch.append((piece, view))
        nbytes, reached = nbytes + view.nbytes, end
        if nbytes >= _BATCH_BYTES:
            yield batch, reached
            batch, nbytes = [], 0
    if batch:
        yield batch, reached


def _order(state: Any, encoded: bytes) -> str:
    """Return a digest of the order of the mappings; "" if all are sorted."""
    if not isinstance(state, dict) or not has_order(encoded.decode()):
        return ""
    return xxhash.xxh3_64_hexdigest(encode_json(state.get("objects")))


def _manifest_bound(snapshot: Snapshot, size: int, state: int) -> int:
    """Return an upper limit of the manifest's size, which is reserved before the manifest is created."""
    total = sum(spec.nbytes for spec in snapshot.specs)
    fair = max(LEAST_CUT_BYTES, -(-total // size))
    held = frozenset[str]() if snapshot.holding is None else snapshot.holding.names
    bound = _MANIFEST_BASE + state + len(encode_json(snapshot.data))
    for spec in snapshot.specs:
        shards = 1 if snapshot.holding is None or spec.name not in held else snapshot.holding.size
        parts = 1 + max(shards, -(-spec.nbytes // fair))
        bound += parts * (192 + 48 * len(spec.shape)) + 6 * len(spec.name)
    return bound + 512 * size + 40 * (total // CHUNK_BYTES + 2 * size)
