"""The input and the output of the hang detectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.core.attempt import AttemptId, Json
from holdfast.core.errors import DocumentError
from holdfast.core.protocol import Cause
from holdfast.launcher.hang.stall_reports import NO_REMOTE_STALLS, RemoteStalls
from holdfast.telemetry.activity import Activity
from holdfast.telemetry.activity_page import Reading

# After this many repetitions at one step, a hang is attributed to the script and counts in its budget.
_SCRIPTS_OWN: Final = 3
# A healthy script may evaluate or recompile for this long between two steps.
_CALM_SECONDS: Final = 60.0

Waits = frozenset[tuple[AttemptId, int, Activity, int]]
"""Ranks that wait for each other: attempt, rank, activity and step of each."""


@dataclass(frozen=True, kw_only=True)
class HangSettings:
    """Deadlines in seconds. If `step` is None, the deadline of a step follows from measured steps.

    If neither `step` nor `min_step` is set, the deadlines are `calm`.
    """

    enabled: bool = True
    step: float | None = None
    min_step: float | None = None
    startup: float = 1200.0
    data: float = 900.0
    checkpoint: float = 900.0
    evaluation: float = 3600.0

    @classmethod
    def from_settings(cls, settings: Json) -> HangSettings:
        """Read `settings.hangDetection` of a membership; missing values have their defaults."""
        given: Json = settings.get("hangDetection") or {}
        startup = settings.get("startupDeadlineSeconds", cls.startup)
        mode, step = given.get("mode", "Enabled"), given.get("stepTimeoutSeconds")
        if mode not in ("Enabled", "Disabled"):
            raise DocumentError(f"invalid hangDetection.mode {mode!r}: expected Enabled or Disabled")
        least = given.get("minStepTimeoutSeconds")
        try:
            return cls(
                enabled=mode == "Enabled",
                step=None if step is None else float(step),
                min_step=None if least is None else float(least),
                startup=float(given.get("startupTimeoutSeconds", startup)),
                data=float(given.get("dataTimeoutSeconds", cls.data)),
                checkpoint=float(given.get("checkpointTimeoutSeconds", cls.checkpoint)),
                evaluation=float(given.get("evaluationTimeoutSeconds", cls.evaluation)),
            )
        except (TypeError, ValueError) as error:
            raise DocumentError(f"hangDetection cannot be read: {error}") from error

    @property
    def calm(self) -> bool:
        """Whether a rank that computes gets more time: if it uses its CPU, and at the first offence of the run."""
        return self.step is None and self.min_step is None

    @property
    def floor(self) -> float:
        """The shortest deadline that follows from measured steps."""
        return _CALM_SECONDS if self.calm else self.min_step or 1.0

    @property
    def longest(self) -> float:
        """The longest deadline: after it, the launcher of any busy rank has ended that rank."""
        return max(self.startup, self.data, self.checkpoint, self.evaluation, self.step or 0.0)


@dataclass(frozen=True, kw_only=True)
class ObservedRank:
    """One local rank of the current attempt."""

    slot: int
    rank: int
    reading: Reading


@dataclass(frozen=True, kw_only=True)
class AbsentRank:
    """One local rank that left its attempt. `awaited`: it has a slot in the current one and has not taken it."""

    slot: int
    rank: int
    reading: Reading
    left_at: float
    awaited: bool

    @property
    def rank_here(self) -> ObservedRank:
        """Return the same rank as if it had not left."""
        return ObservedRank(slot=self.slot, rank=self.rank, reading=self.reading)


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The local ranks that entered the attempt, those that did not yet, and the reports of other launchers."""

    attempt_id: AttemptId
    world_size: int
    ranks_here: tuple[ObservedRank, ...]
    absent: tuple[AbsentRank, ...] = ()
    remote: RemoteStalls = NO_REMOTE_STALLS
    cpu_waits: Mapping[int, float] = field(default_factory=dict)
    """Seconds of CPU starvation since the start of each process, by process ID."""
    cpu_runs: Mapping[int, float] = field(default_factory=dict)
    """Seconds for which the main thread of each process has run, by process ID."""


@dataclass(frozen=True, kw_only=True)
class HangVerdict:
    """A rank that hangs, and one line that reports which ranks wait for it."""

    slot: int
    rank: int
    activity: Activity
    seconds: float
    deadline: float
    message: str
    repeats: int  # hangs before this one since the last completed step
    kills: bool = True  # False: it is enough that all ranks leave the attempt
    waits: Waits = frozenset()

    @property
    def cause(self) -> Cause:
        """The budget that counts the hang: after repeated hangs at one step, the script's."""
        return Cause.APPLICATION if self.repeats >= _SCRIPTS_OWN else Cause.INFRASTRUCTURE
