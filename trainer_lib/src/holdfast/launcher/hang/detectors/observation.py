"""What hang detectors see, and what they find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.core.attempt import AttemptId, Json
from holdfast.core.errors import DocumentError
from holdfast.core.protocol import Cause
from holdfast.launcher.hang.stall_reports import NOBODY, Elsewhere
from holdfast.telemetry.activity import Activity
from holdfast.telemetry.activity_page import Reading

# So many hangs at one step are the script's own doing, and its budget ends them.
_SCRIPTS_OWN: Final = 3

Waits = frozenset[tuple[AttemptId, int, Activity, int]]
"""Ranks that wait for each other: attempt, rank, activity and step of each."""


@dataclass(frozen=True, kw_only=True)
class HangSettings:
    """Deadlines in seconds; `step` None: from the measured steps."""

    enabled: bool = True
    step: float | None = None
    startup: float = 1200.0
    data: float = 900.0
    checkpoint: float = 900.0
    evaluation: float = 3600.0

    @classmethod
    def from_settings(cls, settings: Json) -> HangSettings:
        """Read `settings.hangDetection` of a membership; what is not there has its default."""
        given: Json = settings.get("hangDetection") or {}
        startup = settings.get("startupDeadlineSeconds", cls.startup)
        step = given.get("stepTimeout", "Auto")
        try:
            return cls(
                enabled=step != "Off",
                step=None if step in ("Auto", "Off") else float(step),
                startup=float(given.get("startupTimeoutSeconds", startup)),
                data=float(given.get("dataTimeoutSeconds", cls.data)),
                checkpoint=float(given.get("checkpointTimeoutSeconds", cls.checkpoint)),
                evaluation=float(given.get("evaluationTimeoutSeconds", cls.evaluation)),
            )
        except (TypeError, ValueError) as error:
            raise DocumentError(f"hangDetection cannot be read: {error}") from error

    @property
    def longest(self) -> float:
        """However busy a rank elsewhere is, its launcher has ended it by then."""
        return max(self.startup, self.data, self.checkpoint, self.evaluation, self.step or 0.0)


@dataclass(frozen=True, kw_only=True)
class Sight:
    """One local rank of the present attempt."""

    slot: int
    rank: int
    reading: Reading


@dataclass(frozen=True, kw_only=True)
class AbsentRank:
    """One local rank that left its attempt. `awaited`: it has a place in the present one, and has not taken it."""

    slot: int
    rank: int
    reading: Reading
    left_at: float
    awaited: bool

    @property
    def sight(self) -> Sight:
        """The same rank, seen as one that did not leave."""
        return Sight(slot=self.slot, rank=self.rank, reading=self.reading)


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The local ranks that entered the attempt, at one moment; those that did not yet; and what others say."""

    pair: AttemptId
    world_size: int
    sights: tuple[Sight, ...]
    strays: tuple[AbsentRank, ...] = ()
    elsewhere: Elsewhere = NOBODY
    cpu_waits: Mapping[int, float] = field(default_factory=dict)
    """By process: how long it stood in line for a CPU, all in all."""


@dataclass(frozen=True, kw_only=True)
class HangVerdict:
    """A rank that hangs, and the one line that says who waited for whom."""

    slot: int
    rank: int
    activity: Activity
    seconds: float
    deadline: float
    message: str
    repeats: int  # hangs before this one since a step was made
    kills: bool = True  # False: it is enough that all leave the attempt
    waits: Waits = frozenset()

    @property
    def cause(self) -> Cause:
        """Whose budget it is: again and again at one step, it is the script's."""
        return Cause.APPLICATION if self.repeats >= _SCRIPTS_OWN else Cause.INFRASTRUCTURE
