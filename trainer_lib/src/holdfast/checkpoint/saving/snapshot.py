"""The input and the result of a save. No torch."""

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
    """The state to save.

    It is the same on every rank, except for `per_rank` and for the parts that `holding` or `shares` describe.
    """

    name: CheckpointName
    specs: Sequence[TensorSpec]
    read: Callable[[Piece], Buffer]
    state: Any
    data: Any
    per_rank: Any
    numerics: Mapping[str, Any]
    job_uid: str = ""
    publication: str = ""
    run_id: str = ""
    holding: Holding | None = None
    shares: Shares | None = None
    mesh: Mapping[str, int] | None = None
    created: datetime | None = None
    """The time of the checkpoint; by default, the time at which the manifest is created."""
    fill: Fill | None = None
    """Copies many pieces at once, where this is faster than reading each."""
    inexact: frozenset[str] = frozenset()
    """The tensors that a delta with a threshold need only restore within that threshold."""
    weights: frozenset[str] = frozenset()
    """The tensors that training needs. They must be finite, or the save fails."""
    samples: Mapping[str, str] = field(default_factory=dict)
    """By object, a digest that shows whether its tensors are the same on all ranks (see `replica_check`)."""

    def copy(self, places: Sequence[tuple[Piece, memoryview]]) -> None:
        """Copy each piece into its buffer."""
        if self.fill is not None:
            self.fill(places)
            return
        for piece, target in places:
            target[:] = memoryview(self.read(piece)).cast("B")


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """Whether the checkpoint is durable, and if not, why."""

    committed: bool
    message: str = ""
    cause: str = ""
    """The `FailureCause` of a failed save."""
    nbytes: int = 0
    """The bytes of this rank's share."""
    stalled: float = 0.0
    """The seconds for which training was paused, until the state was copied."""
    seconds: float = 0.0
    """The seconds from the end of the copy until the checkpoint was durable."""
    copying: float = 0.0
    """For a checkpoint in memory: the seconds to send it to another node; 0 if it was not sent."""
    copy_failed: bool = False
    """Whether a checkpoint in memory failed because of its copy on another node."""
    existed: bool = False
    """Whether a checkpoint of this name existed already."""
    full: bool = False
    """Whether the tier has no capacity even for a first checkpoint."""
    differing: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The objects that differ between ranks, with the ranks that differ from rank 0."""
