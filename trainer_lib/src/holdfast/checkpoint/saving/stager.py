"""Copy a rank's share from the live objects into the staging buffer. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from holdfast.checkpoint.format.shard_layout import Piece, ShardPlan
from holdfast.checkpoint.io.fill_progress import Filling
from holdfast.checkpoint.io.rate_limit import UNLIMITED, Pace
from holdfast.checkpoint.io.staging_buffer import Arena
from holdfast.checkpoint.saving.planner import Layouts, Planner
from holdfast.checkpoint.saving.snapshot import Snapshot

# The progress of the copy is reported after a sixteenth of the image, so that the disk can start. It is then reported
# each time it has doubled, because the writes are slower than the copy. A report covers at least `_PART_BYTES`.
_FIRST_PART: Final = 1 / 16
_PART_BYTES: Final = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A snapshot and the image of this rank's file, in an arena. After `copy`, the live objects are not needed.

    With an `error`, the image cannot be created, and the save of all ranks fails with it.
    """

    snapshot: Snapshot
    layouts: Layouts
    plan: ShardPlan
    image: memoryview
    error: str = ""
    filling: Filling = field(default_factory=Filling)
    pace: Pace = UNLIMITED

    def copy(self) -> None:
        """Fill the image, while a writer may follow. Training is paused only during this call."""
        if self.error:
            return
        try:
            self.image[: len(self.plan.header)] = self.plan.header
            self.image[self.plan.nbytes :] = bytes(self.image.nbytes - self.plan.nbytes)
            for part in self._parts():
                self.snapshot.copy([(piece, self.image[offset:end]) for piece, offset, end in part])
                self.filling.reach(part[-1][2])
        except BaseException as error:
            self.filling.fail(f"the state could not be copied: {error!r}")
            raise
        self.filling.reach(self.image.nbytes)

    def _parts(self) -> Iterator[list[tuple[Piece, int, int]]]:
        """Yield pieces with their places. Each part has about as many bytes as all parts before it."""
        least = max(_PART_BYTES, int(self.plan.nbytes * _FIRST_PART))
        part: list[tuple[Piece, int, int]] = []
        for piece, offset in zip(self.plan.pieces, self.plan.offsets, strict=True):
            part.append((piece, offset, offset + piece.nbytes))
            if part[-1][2] >= least:
                yield part
                part, least = [], 2 * part[-1][2]
        if part:
            yield part


def plan(snapshot: Snapshot, arena: Arena | None, planner: Planner, *, rank: int, size: int) -> Staged:
    """Reserve the buffer for this rank's share. Without an arena, the caller copies the live objects itself.

    Nothing is copied yet.
    """
    layouts = planner.layouts(snapshot.specs, snapshot.shares or snapshot.holding, size)
    own, image, error = layouts.plan(snapshot.name, rank), memoryview(b""), ""
    try:
        if arena is not None:
            image = arena.image(own.nbytes)
    except (OSError, MemoryError) as trouble:
        error = f"rank {rank}: no memory for a copy of {own.nbytes} bytes: {trouble}"
    return Staged(snapshot=snapshot, layouts=layouts, plan=own, image=image, error=error)


def stage(snapshot: Snapshot, arena: Arena, planner: Planner, *, rank: int, size: int) -> Staged:
    """Copy this rank's share from the live objects."""
    staged = plan(snapshot, arena, planner, rank=rank, size=size)
    staged.copy()
    return staged
