"""What the ranks of a save tell each other at each turn. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.checkpoint.format.failure_causes import FailureCause, cause_of
from holdfast.checkpoint.format.file_names import CheckpointName, inherited
from holdfast.checkpoint.format.records import Chunk, FileRecord, Patch
from holdfast.core.json_fields import JsonFields


@dataclass(frozen=True, kw_only=True)
class Trouble(JsonFields):
    """Why something failed; false if it did not."""

    error: str = ""
    cause: str = ""

    def __bool__(self) -> bool:
        return bool(self.error)

    @classmethod
    def of(cls, error: Exception, rank: int) -> Trouble:
        return cls(error=f"rank {rank}: {error}", cause=cause_of(error))

    @classmethod
    def no_memory(cls, error: str) -> Trouble:
        return cls(error=error, cause=FailureCause.MEMORY)

    @classmethod
    def among(cls, told: Iterable[Trouble]) -> Trouble:
        """All of it, with the cause of the first."""
        every = [one for one in told if one]
        return cls(error="; ".join(one.error for one in every), cause=every[0].cause) if every else NONE


NONE: Final = Trouble()


@dataclass(frozen=True, kw_only=True)
class Begun(JsonFields):
    """Rank 0 has a staging folder, or says why not: the commit `exists`, or there is trouble."""

    staging: str = ""
    parent: CheckpointName | None = None
    exists: bool = False
    trouble: Trouble = NONE


@dataclass(frozen=True, kw_only=True)
class RankWritten(JsonFields):
    """What one rank wrote, or why it could not.

    Of all of a share, `layout` says where each tensor's piece lies: every rank computes the same. Of a share that
    stands on earlier commits, `chunks` and `patches` say it, and `files` has those of before too.
    """

    files: Mapping[str, FileRecord] = field(default_factory=dict)
    layout: str = ""
    chunks: Mapping[str, tuple[Chunk, ...]] = field(default_factory=dict)
    patches: Mapping[str, Patch] = field(default_factory=dict)
    objects: Mapping[str, str] = field(default_factory=dict)
    """By object, a digest of its state, which should be the same on all ranks."""
    trouble: Trouble = NONE

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for name, file in self.files.items() if inherited(name) is None)


@dataclass(frozen=True, kw_only=True)
class Finished(JsonFields):
    """Rank 0 has published the commit, which `stands` on earlier ones or not, or says why not; `exists`: a commit of
    this name is there all the same."""

    stands: bool = False
    exists: bool = False
    trouble: Trouble = NONE
