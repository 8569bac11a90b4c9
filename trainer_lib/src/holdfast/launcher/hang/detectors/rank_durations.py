"""How long each rank has been at its activity, and its deadline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from holdfast.launcher.hang.cpu_starvation import Starvation
from holdfast.launcher.hang.detectors.observation import HangSettings, Observed, Sight, Waits
from holdfast.launcher.hang.detectors.pace import KNOWN_STEPS, Pace, Pauses
from holdfast.launcher.hang.stall_reports import ReportedSeconds, Stall, in_collective
from holdfast.telemetry.activity import Activity
from holdfast.telemetry.activity_page import Reading

# The documented deadline is max(1 s, 5 × the median step). The constants are lower by the interval between looks and
# their cost.
STEP_FACTOR: Final = 4.5
LEAST_SECONDS: Final = 0.85
# Deadline of a waiting rank without a sign of life: before steps are known, and while groups form and state is moved.
_SILENT_SECONDS: Final = 30.0
_SILENT_SYNC_SECONDS: Final = 5.0
_LATE_BEAT_SECONDS: Final = 0.4
_NO_HURRY: Final = 10.0
_GROWTH: Final = 4.0
_MOST_GROWTH: Final = 6
# The deadline counts from the first rank that waits. The others start to wait up to a step later.
_WAIT_SHARE: Final = 0.8
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
    pace: Pace
    reported: ReportedSeconds
    repeats: int
    mismatch: Waits  # the last one found, which is not reported again

    def stall(self, sight: Sight) -> Stall:
        """Return the activity of a local rank in the form in which launchers report it to each other."""
        reading, silent = sight.reading, self.stopped(sight.reading)
        if in_collective(reading.activity) and not silent:
            seconds, limit = self.awake(reading, reading.since), self._wait_limit(reading)
        else:
            seconds, limit = self.age(sight), self.limit(sight)
        return Stall(
            attempt_id=self.seen.attempt_id,
            rank=sight.rank,
            activity=reading.activity,
            step=reading.step,
            silent=silent,
            seconds=round(seconds, 3),
            deadline=round(limit, 3),
        )

    def limits(self) -> Iterator[tuple[Sight, float]]:
        """Yield each local rank with a deadline, and the deadline."""
        for sight in self.seen.sights:
            if sight.reading.activity not in NEVER:
                yield sight, self.limit(sight)

    def limit(self, sight: Sight) -> float:
        """Return how many seconds the activity of a rank may keep others waiting."""
        reading = sight.reading
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
        if reading.activity is Activity.APPLY and not self.silent(sight):
            return settings.data
        step = self._step_limit(reading)
        if reading.activity is Activity.COMPUTE:
            return self.pace.first(settings.startup) if step is None else step
        if step is None:
            return _SILENT_SECONDS
        return max(step, _SILENT_SYNC_SECONDS) if reading.activity in _BETWEEN_WORLDS else step

    def _wait_limit(self, reading: Reading) -> float:
        """Return how many seconds a rank may wait while all others wait too."""
        step = None if reading.activity is Activity.SYNC else self._step_limit(reading)
        return self.settings.startup if step is None else _WAIT_SHARE * step

    def _step_limit(self, reading: Reading) -> float | None:
        """Return the deadline of a step in seconds; None if not enough steps are known."""
        if reading.made < KNOWN_STEPS:
            return None
        if self.settings.step is not None:
            return self.settings.step
        known = self.pace.median(self.seen.world_size)
        if known is None:
            return None
        return max(LEAST_SECONDS, STEP_FACTOR * known) * _GROWTH ** min(self.repeats, _MOST_GROWTH)

    def age(self, sight: Sight) -> float:
        """Return for how many seconds a rank has kept others waiting; for a waiting rank, the time without a beat."""
        reading = sight.reading
        return self.awake(reading, reading.beat if self.by_beat(sight) else reading.since)

    def awake(self, reading: Reading, since: float) -> float:
        """Return the seconds that count for a rank. Starvation of the launcher and of the rank is subtracted once."""
        lost = max(self.pauses.lost(since, self.now), self.starvation.seconds(reading.pid, since))
        return max(0.0, self.now - since - lost)

    def by_beat(self, sight: Sight) -> bool:
        """Whether the rank only has to show signs of life."""
        activity = sight.reading.activity
        return activity.waiting or (activity is Activity.APPLY and self.silent(sight))

    def silent(self, sight: Sight) -> bool:
        """Whether the rank shows no sign of life."""
        return self.awake(sight.reading, sight.reading.beat) > LEAST_SECONDS

    def stopped(self, reading: Reading) -> bool:
        """Whether the process may be stopped. Such a rank does not count as waiting."""
        return self.awake(reading, reading.beat) > _LATE_BEAT_SECONDS

    def patient(self, limit: float) -> float:
        """Return the longer deadline that applies if a verdict would leave no rank with its state."""
        return max(limit, min(limit * _NO_HURRY, self.settings.startup))

    def reported_seconds(self, stall: Stall) -> float:
        """Return for how many seconds a remote rank has been at its activity."""
        return self.reported.seconds(stall, self.pauses.awake, self.now)
