"""What a save is made of, and what comes of it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.shard_layout import Holding, Piece, Shares, TensorSpec
from holdfast.checkpoint.io.durable_files import Buffer

Fill = Callable[[Sequence[tuple[Piece, memoryview]]], None]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What is to be committed. The same on every rank, but for `alone` and the parts of what `holding` or `shares` is
    about."""

    name: CheckpointName
    specs: Sequence[TensorSpec]
    read: Callable[[Piece], Buffer]
    state: Any
    data: Any
    alone: Any
    numerics: Mapping[str, Any]
    job_uid: str = ""
    publication: str = ""
    run_id: str = ""
    holding: Holding | None = None
    shares: Shares | None = None
    mesh: Mapping[str, int] | None = None
    created: datetime | None = None
    """When, if not when its manifest is made."""
    fill: Fill | None = None
    """Copies many pieces at once, where that is faster than to read each."""
    inexact: frozenset[str] = frozenset()
    """Of these tensors, with a threshold for deltas, a restored element need only be within it."""
    weights: frozenset[str] = frozenset()
    """The tensors without which there is nothing to train: they must be finite, or the commit fails."""
    samples: Mapping[str, str] = field(default_factory=dict)
    """By object, what tells whether its tensors are alike on all ranks (see `alike`)."""

    def copy(self, places: Sequence[tuple[Piece, memoryview]]) -> None:
        """Put each piece where it belongs."""
        if self.fill is not None:
            self.fill(places)
            return
        for piece, target in places:
            target[:] = memoryview(self.read(piece)).cast("B")


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """Whether the commit is durable, and if not, why."""

    committed: bool
    message: str = ""
    cause: str = ""
    """Of one that failed: a word of `failures.FailureCause`."""
    nbytes: int = 0
    """This rank's share."""
    stalled: float = 0.0
    """Until it was copied."""
    seconds: float = 0.0
    """From the end of the copy until it was durable."""
    copying: float = 0.0
    """Of a commit in memory, what it took to send it to another node; 0 if it was not sent."""
    copy_failed: bool = False
    """Of a commit in memory that failed: by its copy on another node."""
    existed: bool = False
    """A commit of this name was there before this one could be."""
    full: bool = False
    """There is no room on the tier, not even for a first commit."""
    apart: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The objects that are not the same on all ranks, with the ranks on which they are not as on rank 0."""
