"""The messages that the ranks of a save exchange in each phase. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.checkpoint.format.failure_causes import FailureCause, cause_of
from holdfast.checkpoint.format.file_names import CheckpointName, inherited
from holdfast.checkpoint.format.records import Chunk, FileRecord, Patch
from holdfast.core.json_fields import JsonFields


@dataclass(frozen=True, kw_only=True)
class SaveFailure(JsonFields):
    """The error and cause of a failure. It is false if nothing failed."""

    error: str = ""
    cause: str = ""

    def __bool__(self) -> bool:
        return bool(self.error)

    @classmethod
    def of(cls, error: Exception, rank: int) -> SaveFailure:
        return cls(error=f"rank {rank}: {error}", cause=cause_of(error))

    @classmethod
    def no_memory(cls, error: str) -> SaveFailure:
        return cls(error=error, cause=FailureCause.MEMORY)

    @classmethod
    def among(cls, failures: Iterable[SaveFailure]) -> SaveFailure:
        """Join all errors, with the cause of the first."""
        every = [one for one in failures if one]
        return cls(error="; ".join(one.error for one in every), cause=every[0].cause) if every else NONE


NONE: Final = SaveFailure()


@dataclass(frozen=True, kw_only=True)
class SaveStarted(JsonFields):
    """Rank 0's first message: the staging folder, or that the checkpoint `exists` already, or an error."""

    staging: str = ""
    parent: CheckpointName | None = None
    exists: bool = False
    trouble: SaveFailure = NONE


@dataclass(frozen=True, kw_only=True)
class RankWritten(JsonFields):
    """What one rank wrote, or why it failed.

    For a complete share, `layout` identifies the place of each tensor's piece, which every rank computes. For a share
    that builds on earlier checkpoints, `chunks` and `patches` state the places, and `files` includes the earlier
    files.
    """

    files: Mapping[str, FileRecord] = field(default_factory=dict)
    layout: str = ""
    chunks: Mapping[str, tuple[Chunk, ...]] = field(default_factory=dict)
    patches: Mapping[str, Patch] = field(default_factory=dict)
    objects: Mapping[str, str] = field(default_factory=dict)
    """A digest of each object's state, which should be the same on all ranks."""
    trouble: SaveFailure = NONE

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for name, file in self.files.items() if inherited(name) is None)


@dataclass(frozen=True, kw_only=True)
class Finished(JsonFields):
    """Rank 0's last message: the checkpoint is published, or an error.

    `stands`: it builds on earlier checkpoints. `exists`: a checkpoint of this name exists in spite of the error.
    """

    stands: bool = False
    exists: bool = False
    trouble: SaveFailure = NONE
