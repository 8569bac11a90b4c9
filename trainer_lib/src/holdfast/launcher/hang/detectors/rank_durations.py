"""How long each rank has been at its activity, and its deadline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from holdfast.launcher.hang.cpu_progress import CpuProgress
from holdfast.launcher.hang.cpu_starvation import Starvation
from holdfast.launcher.hang.detectors.observation import HangSettings, Observed, ObservedRank, Waits
from holdfast.launcher.hang.detectors.pace import KNOWN_STEPS, Pace, Pauses
from holdfast.launcher.hang.stall_reports import ReportedSeconds, Stall, in_collective
from holdfast.telemetry.activity import Activity
from holdfast.telemetry.activity_page import Reading

# The documented deadline is max(floor, 5 × the median step). The constants are lower by the interval between looks
# and their cost.
STEP_FACTOR: Final = 4.5
_LOOK_SECONDS: Final = 0.15
LEAST_SECONDS: Final = 0.85
# Deadline of a waiting rank without a sign of life: before steps are known, and while groups form and state is moved.
_SILENT_SECONDS: Final = 30.0
_SILENT_SYNC_SECONDS: Final = 5.0
_LATE_BEAT_SECONDS: Final = 0.4
_PATIENT_FACTOR: Final = 10.0
_GROWTH: Final = 4.0
_MOST_GROWTH: Final = 6
# The deadline counts from the first rank that waits. The others start to wait up to a step later.
_WAIT_SHARE: Final = 0.8
_LEAST_STEP: Final = 0.2
# Calm deadlines: stalls are reported after this share of the deadline, so that all launchers have all reports when it
# ends. The first offence of a run has a longer deadline.
REPORT_SHARE: Final = 0.6
_PROGRESS_SHARE: Final = 0.5
_FIRST_OFFENCE: Final = 2.0
NEVER: Final = frozenset({Activity.PARKED, Activity.DONE})
_BETWEEN_WORLDS: Final = frozenset({Activity.SYNC, Activity.PARKED})


@dataclass(frozen=True, kw_only=True)
class RankDurations:
    """The ranks at one moment, and the inputs of their deadlines."""

    seen: Observed
    now: float
    settings: HangSettings
    pauses: Pauses
    starvation: Starvation
    progress: CpuProgress
    pace: Pace
    reported: ReportedSeconds
    repeats: int
    mismatch: Waits  # the last one found, which is not reported again
    pause: float | None  # the longest time without CPU progress after which a rank continued; None before the first

    def stall(self, rank_here: ObservedRank) -> Stall:
        """Return the activity of a local rank in the form in which launchers report it to each other."""
        reading, silent = rank_here.reading, self.stopped(rank_here.reading)
        if in_collective(reading.activity) and not silent:
            seconds, limit = self.awake(reading, reading.since), self._wait_limit(reading)
        else:
            seconds, limit = self.age(rank_here), self.limit(rank_here)
        return Stall(
            attempt_id=self.seen.attempt_id,
            rank=rank_here.rank,
            activity=reading.activity,
            step=reading.step,
            silent=silent,
            seconds=round(seconds, 3),
            deadline=round(limit, 3),
            progresses=self.busy(rank_here),
        )

    def worth_reporting(self, rank_here: ObservedRank) -> bool:
        """Whether other launchers must know the activity of a local rank."""
        stall = self.stall(rank_here)
        return stall.silent or stall.progresses or stall.seconds >= REPORT_SHARE * stall.deadline

    def limits(self) -> Iterator[tuple[ObservedRank, float]]:
        """Yield each local rank with a deadline, and the deadline."""
        for rank_here in self.seen.ranks_here:
            if rank_here.reading.activity not in NEVER:
                yield rank_here, self.limit(rank_here)

    def limit(self, rank_here: ObservedRank) -> float:
        """Return how many seconds the activity of a rank may keep others waiting."""
        reading = rank_here.reading
        settings = self.settings
        fixed = {
            Activity.STARTUP: settings.startup,
            Activity.RESTORE: settings.startup,
            Activity.DATA: settings.data,
            Activity.CHECKPOINT: settings.checkpoint,
            Activity.EVALUATION: settings.evaluation,
        }
        if reading.activity in fixed:
            return fixed[reading.activity]
        if reading.activity is Activity.APPLY and not self.silent(rank_here):
            return settings.data
        if reading.activity is Activity.COMPUTE:
            return self._compute_limit(rank_here)
        step = self._step_limit(reading)
        if step is None:
            return max(_SILENT_SECONDS, settings.floor)
        return max(step, _SILENT_SYNC_SECONDS) if reading.activity in _BETWEEN_WORLDS else step

    def _wait_limit(self, reading: Reading) -> float:
        """Return how many seconds a rank may wait while all others wait too."""
        step = None if reading.activity is Activity.SYNC else self._step_limit(reading)
        if step is None:
            return self.settings.startup
        return max(_WAIT_SHARE * step, step - max(_LEAST_STEP, self.pace.median(self.seen.world_size) or 0.0))

    def _compute_limit(self, rank_here: ObservedRank) -> float:
        base = self.base(rank_here.reading)
        if not self.settings.calm:
            return base
        if self.progresses(rank_here.reading):
            return max(base, self.settings.evaluation)
        if self.pause is not None:
            return max(base, _FIRST_OFFENCE * self.pause)
        return base if self.silent(rank_here) else max(base, min(_FIRST_OFFENCE * base, self.settings.startup))

    def base(self, reading: Reading) -> float:
        """Return how many seconds a step may take, by its measured duration."""
        step = self._step_limit(reading)
        return self.pace.first(self.settings.startup, self.settings.floor) if step is None else step

    def _step_limit(self, reading: Reading) -> float | None:
        """Return the deadline of a step in seconds; None if not enough steps are known."""
        if reading.made < KNOWN_STEPS:
            return None
        if self.settings.step is not None:
            return self.settings.step
        known = self.pace.median(self.seen.world_size)
        if known is None:
            return None
        return max(self.settings.floor - _LOOK_SECONDS, STEP_FACTOR * known) * _GROWTH ** min(
            self.repeats, _MOST_GROWTH
        )

    def age(self, rank_here: ObservedRank) -> float:
        """Return for how many seconds a rank has kept others waiting; for a waiting rank, the time without a beat."""
        reading = rank_here.reading
        return self.awake(reading, reading.beat if self.by_beat(rank_here) else self.began(reading))

    def began(self, reading: Reading) -> float:
        """Return the time from which the deadline counts: its start, or the last progress of a rank that stopped."""
        calm = self.calm(reading) and not self.progresses(reading)
        return max(reading.since, self.progress.last(reading.pid)) if calm else reading.since

    def calm(self, reading: Reading) -> bool:
        """Whether the rank computes, and has calm deadlines."""
        return self.settings.calm and reading.activity is Activity.COMPUTE

    def quiet(self, reading: Reading) -> float:
        """Return for how many seconds the main thread has made no progress in this activity."""
        return self.awake(reading, max(reading.since, self.progress.last(reading.pid)))

    def progresses(self, reading: Reading) -> bool:
        """Whether the rank computes and its main thread uses the CPU. It may evaluate or compile, or loop forever."""
        return self.calm(reading) and self.quiet(reading) < _PROGRESS_SHARE * self.base(reading)

    def busy(self, rank_here: ObservedRank) -> bool:
        """Whether the rank progresses, but takes longer than a step. Other ranks may wait for it, as in a barrier."""
        reading = rank_here.reading
        taken = self.awake(reading, reading.since)
        return self.progresses(reading) and taken >= REPORT_SHARE * self.base(reading)

    def awaits_busy(self, rank_here: ObservedRank) -> bool:
        """Whether the rank may wait for a busy rank in a collective of the script, and does not use its CPU."""
        if not self.calm(rank_here.reading) or self.busy(rank_here):
            return False
        here = (*self.seen.ranks_here, *(absent_rank.rank_here for absent_rank in self.seen.absent))
        return any(map(self.busy, here)) or any(stall.progresses for stall in self.seen.remote.stalls)

    def awake(self, reading: Reading, since: float) -> float:
        """Return the seconds that count for a rank. Starvation of the launcher and of the rank is subtracted once."""
        lost = max(self.pauses.lost(since, self.now), self.starvation.seconds(reading.pid, since))
        return max(0.0, self.now - since - lost)

    def by_beat(self, rank_here: ObservedRank) -> bool:
        """Whether the rank only has to show signs of life."""
        activity = rank_here.reading.activity
        return activity.waiting or (activity is Activity.APPLY and self.silent(rank_here))

    def silent(self, rank_here: ObservedRank) -> bool:
        """Whether the rank shows no sign of life."""
        return self.awake(rank_here.reading, rank_here.reading.beat) > LEAST_SECONDS

    def stopped(self, reading: Reading) -> bool:
        """Whether the process may be stopped. Such a rank does not count as waiting."""
        return self.awake(reading, reading.beat) > _LATE_BEAT_SECONDS

    def with_long_limit(self, limit: float) -> float:
        """Return the longer deadline that applies if a verdict would leave no rank with its state."""
        return max(limit, min(limit * _PATIENT_FACTOR, self.settings.startup))

    def reported_seconds(self, stall: Stall) -> float:
        """Return for how many seconds a remote rank has been at its activity."""
        return self.reported.seconds(stall, self.pauses.awake, self.now)
