"""Checkpoints that hold only the blocks that changed since the previous checkpoint. No torch.

A rank divides its share into blocks of complete rows. It keeps the digest of each block, and the checkpoint file that
holds the block. The next checkpoint holds only the blocks with another digest, and names the others where they are. A
manifest therefore names the place and the digest of every byte of its checkpoint, and a restore follows no chain.

A chain begins with a full checkpoint, belongs to one attempt, and has at most `every` checkpoints. It continues only
if all its checkpoints still exist. A rank writes every block that it has no record of. Ranks need to agree only on
the parent.

With a threshold, a rank may write only some elements of the changed blocks of weights (`lossy_delta`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import xxhash

from holdfast.checkpoint.format.file_names import CheckpointName, tensors_file
from holdfast.checkpoint.format.records import Chunk, FileRecord, Patch
from holdfast.checkpoint.format.shard_layout import ITEM_BYTES, Piece, ShardPlan, lay_out
from holdfast.checkpoint.io.staging_buffer import Arena
from holdfast.checkpoint.saving import lossy_delta
from holdfast.checkpoint.saving.rank_results import RankWritten
from holdfast.core.errors import UsageError
from holdfast.core.limits import MOST_FULL_EVERY

# Small enough that a few changed rows of an embedding do not write the rest. Each block needs a record in memory.
BLOCK_BYTES: Final = 64 << 10
MOST_BLOCKS: Final = 8192
"""The limit of blocks per piece of a tensor. Larger pieces have larger blocks."""
# If more than this part of a share changed, the share is written completely: selecting blocks would need as much
# memory again.
_WORTH: Final = 0.5
# Sparse differences accept this cost: with a dense Adam, the moments (two thirds of the state) always change.
_WORTH_SPARSE: Final = 0.9

FileOffset = tuple[str, int]
"""A file, under its name in a later manifest (`<checkpoint>/<file>`), and an offset in it."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The blocks of a piece, in order of rows."""

    digests: tuple[bytes, ...]
    places: tuple[FileOffset, ...]


@dataclass(frozen=True, kw_only=True)
class Base:
    """A rank's record of the last checkpoint: its own blocks, and the files that hold them."""

    pieces: Mapping[Piece, Blocks]
    files: Mapping[str, FileRecord]


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """The part of a rank's share that it writes into a checkpoint, and the places of the rest."""

    plan: ShardPlan
    image: memoryview
    pieces: Mapping[Piece, Blocks]
    patches: Mapping[str, Patch] = field(default_factory=dict)
    """By tensor: the patches of pieces whose blocks are those of an earlier checkpoint, although some elements
    changed.
    """


def rows_of(piece: Piece) -> tuple[int, int]:
    """Return the number of rows per block, and the number of rows of the piece."""
    rows = piece.shape[0] if piece.shape else 1
    row = piece.nbytes // max(1, rows)
    block = max(BLOCK_BYTES, piece.nbytes // MOST_BLOCKS)
    return max(1, block // max(1, row)), rows


def blocks_of(piece: Piece) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of each block in the piece, in bytes."""
    step, rows = rows_of(piece)
    row = piece.nbytes // max(1, rows)
    for begin in range(0, max(1, rows), step):  # an empty piece has one block, and so a place
        yield begin * row, min(rows, begin + step) * row


def digests_of(piece: Piece, data: memoryview) -> tuple[bytes, ...]:
    return tuple(xxhash.xxh3_128_digest(data[begin:end]) for begin, end in blocks_of(piece))


def subtract(
    plan: ShardPlan,
    image: memoryview,
    base: Base,
    own_file: str,
    arena: Arena,
    *,
    differ: lossy_delta.Differ = lossy_delta.exactly,
) -> RankShare:
    """Return the share without the blocks that did not change. `own_file` is the file that it is written to.

    `differ` selects the pieces that are written as a patch instead of as blocks.
    """
    parts = list(_parts(plan, image))
    digests = {piece: digests_of(piece, data) for piece, _, data in parts}
    changed = {piece: _changed(piece, digests[piece], base.pieces.get(piece)) for piece, _, _ in parts}
    differences = differ([(piece, data) for piece, _, data in parts], changed)
    changed |= {piece: {} for piece in differences}
    left = sum(end - begin for blocks in changed.values() for begin, end in blocks.values())
    left += sum(one.nbytes for one in differences.values())
    if left > (_WORTH_SPARSE if differences else _WORTH) * plan.nbytes:
        return RankShare(plan=plan, image=image, pieces=_in_place(parts, own_file, digests))
    stacks = [_stacked(piece, blocks) for piece, blocks in changed.items() if blocks]
    stacks += [stack for one in differences.values() for stack in one.stacks]
    packed, target = _packed(stacks, own_file, arena)
    begins = {piece.spec.name: offset for piece, offset in zip(packed.pieces, packed.offsets, strict=True)}
    pieces = {piece: base.pieces[piece] for piece in differences}
    for piece, _, data in parts:
        if piece in differences:
            continue
        at, places = begins.get(piece.spec.name, 0), []
        for index in range(len(digests[piece])):
            if index not in changed[piece]:
                places.append(base.pieces[piece].places[index])
                continue
            begin, end = changed[piece][index]
            target[at : at + end - begin] = data[begin:end]
            places.append((own_file, at))
            at += end - begin
        pieces[piece] = Blocks(digests=digests[piece], places=tuple(places))
    file = own_file.partition("/")[2]
    patches = {piece.spec.name: one.write(target, begins, file) for piece, one in differences.items()}
    return RankShare(plan=packed, image=target, pieces=pieces, patches=patches)


def full_share(plan: ShardPlan, image: memoryview, own_file: str) -> RankShare:
    parts = list(_parts(plan, image))
    digests = {piece: digests_of(piece, data) for piece, _, data in parts}
    return RankShare(plan=plan, image=image, pieces=_in_place(parts, own_file, digests))


def _parts(plan: ShardPlan, image: memoryview) -> Iterator[tuple[Piece, int, memoryview]]:
    for piece, offset in zip(plan.pieces, plan.offsets, strict=True):
        yield piece, offset, image[offset : offset + piece.nbytes]


def _in_place(
    parts: Iterable[tuple[Piece, int, memoryview]], own_file: str, digests: Mapping[Piece, tuple[bytes, ...]]
) -> dict[Piece, Blocks]:
    return {
        piece: Blocks(
            digests=digests[piece], places=tuple((own_file, offset + begin) for begin, _ in blocks_of(piece))
        )
        for piece, offset, _ in parts
    }


def _packed(pieces: Iterable[Piece], own_file: str, arena: Arena) -> tuple[ShardPlan, memoryview]:
    """Plan a file for these pieces, and write its header into a buffer."""
    plan = lay_out(pieces).headed({"format": "pt", "delta": own_file})
    image = arena.image(plan.nbytes)
    image[: len(plan.header)] = plan.header
    image[plan.nbytes :] = bytes(image.nbytes - plan.nbytes)
    return plan, image


def chunks_of(piece: Piece, blocks: Blocks, own: str) -> tuple[Chunk, ...]:
    """Return the chunks of a piece, with neighbours in one file joined. `own` is the checkpoint that names them."""
    step, rows = rows_of(piece)
    row = ITEM_BYTES[piece.spec.dtype] * math.prod(piece.shape[1:])
    runs: list[tuple[FileOffset, int, int]] = []  # file offset, first row, end row
    for index, (file, offset) in enumerate(blocks.places):
        begin, end = index * step, min(rows, (index + 1) * step)
        if runs and runs[-1][0][0] == file and runs[-1][0][1] + (runs[-1][2] - runs[-1][1]) * row == offset:
            runs[-1] = (runs[-1][0], runs[-1][1], end)
        else:
            runs.append(((file, offset), begin, end))
    return tuple(
        Chunk(
            file=file.removeprefix(f"{own}/"),
            offset=offset,
            nbytes=(end - begin) * row,
            start=(piece.start[0] + begin, *piece.start[1:]) if piece.start else (),
            shape=(end - begin, *piece.shape[1:]) if piece.shape else (),
        )
        for (file, offset), begin, end in runs
    )


def _changed(piece: Piece, digests: tuple[bytes, ...], before: Blocks | None) -> dict[int, tuple[int, int]]:
    """Return the blocks to write, by number.

    Empty pieces are always written, so that they need no other checkpoint.
    """
    spans = enumerate(blocks_of(piece))
    if before is None or not piece.nbytes:
        return dict(spans)
    return {index: span for index, span in spans if digests[index] != before.digests[index]}


def _stacked(piece: Piece, blocks: Mapping[int, tuple[int, int]]) -> Piece:
    """Return the changed blocks as one tensor with fewer rows, because a file names each tensor only once."""
    if not piece.shape:
        return piece
    step, rows = rows_of(piece)
    count = sum(min(rows, (index + 1) * step) - index * step for index in blocks)
    return Piece(spec=piece.spec, start=(0,) * len(piece.shape), shape=(count, *piece.shape[1:]))


@dataclass
class Chain:
    """The checkpoints of one attempt that build on each other, as recorded by one rank.

    `links` is the same on every rank, because all ranks receive the same messages.
    """

    every: int
    threshold: float = 0.0
    links: list[CheckpointName] = field(default_factory=list)
    _base: Base | None = None
    _pending: Base | None = None
    _arena: Arena = field(default_factory=Arena)
    _bases: lossy_delta.Bases = field(init=False)

    def __post_init__(self) -> None:
        if not 2 <= self.every <= MOST_FULL_EVERY:
            raise UsageError(
                f"invalid value {self.every} for full_every: expected 2 to {MOST_FULL_EVERY}, or 1 for full "
                "checkpoints only"
            )
        self._bases = lossy_delta.Bases(threshold=lossy_delta.threshold(self.threshold))

    def parent(self, exists: Callable[[CheckpointName], bool]) -> CheckpointName | None:
        """Return the checkpoint that the next one builds on; None if the next one is a full checkpoint."""
        if not self.links or len(self.links) >= self.every or not all(map(exists, self.links)):
            return None
        return self.links[-1]

    def share(
        self,
        name: CheckpointName,
        rank: int,
        plan: ShardPlan,
        image: memoryview,
        *,
        full: bool,
        inexact: Collection[str] = (),
    ) -> RankShare:
        """Return what this rank writes. With `full`, the checkpoint is a full one.

        For the tensors in `inexact`, a restored element only needs to be within the threshold of the current value.
        """
        own_file = f"{name}/{tensors_file(rank)}"
        if full or self._base is None:
            return full_share(plan, image, own_file)
        try:
            differ = partial(self._bases.differences, inexact=inexact)
            return subtract(plan, image, self._base, own_file, self._arena, differ=differ)
        except (MemoryError, OSError):  # a complete share needs no memory in addition to the image
            return full_share(plan, image, own_file)

    def record(self, name: CheckpointName, share: RankShare, written: Mapping[str, FileRecord]) -> RankWritten:
        """Return the manifest's data about this rank's share, and keep this rank's record of it."""
        files = {} if self._base is None else dict(self._base.files)
        files |= {f"{name}/{file}": record for file, record in written.items()}
        named = {file for blocks in share.pieces.values() for file, _ in blocks.places}
        self._pending = Base(pieces=share.pieces, files={file: files[file] for file in sorted(named)})
        earlier = {file: files[file] for file in sorted(named) if not file.startswith(f"{name}/")}
        return RankWritten(
            files={**written, **earlier},
            chunks={piece.spec.name: chunks_of(piece, blocks, str(name)) for piece, blocks in share.pieces.items()},
            patches=share.patches,
        )

    def settled(
        self,
        name: CheckpointName,
        plan: ShardPlan,
        image: memoryview,
        *,
        incremental: bool,
        inexact: Collection[str] = (),
    ) -> None:
        """Record that the checkpoint was published.

        With `incremental`, it builds on the previous one. The image is that of `share`.
        """
        self.links = [*self.links, name] if incremental else [name]
        before = {} if self._base is None else self._base.pieces
        self._base, self._pending = self._pending, None
        if self.threshold and self._base is not None:
            every = self._base.pieces.items()
            same = {piece for piece, own in every if piece in before and own.digests == before[piece].digests}
            self._bases.keep([(piece, data) for piece, _, data in _parts(plan, image)], same, inexact)
