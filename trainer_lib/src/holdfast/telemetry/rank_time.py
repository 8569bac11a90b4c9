"""The use of a rank's time. Pure: the clock is a parameter.

A rank accounts for its time in a world, from the start of its process groups until it leaves. The launcher measures
the time before, between and after worlds (`launcher.accounting`). Each activity has a stopwatch, and so has the whole
time in a world. The time that no activity explains is reported as unattributed.

The time of a step in progress is not attributed yet (`open`). It is productive once the step is completed. It is
recomputed time if the step is discarded, or if the job has completed the step before. Waiting that ends in leaving
the world was waiting for the detection of a failure. So the time of a cause never decreases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from holdfast.telemetry.activity import Activity

Clock = Callable[[], float]

# Prior of the failure rate's gamma posterior: one failure in one day. A week without failures outweighs it.
PRIOR_FAILURES: Final = 1.0
PRIOR_SECONDS: Final = 86_400.0
# Upper bounds of the histograms of recoveries, in seconds.
BOUNDS: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_REPORT_SECONDS: Final = 1.0


class Spent(StrEnum):
    """The use of a rank's time. All causes except the first are badput."""

    PRODUCTIVE = "productive"
    STARTUP = "startup"
    DATA = "data"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    DETECTION = "detection"
    RESTART = "restart"
    RECOMPUTE = "recompute"
    IDLE = "idle"


class Timer:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._before = 0.0
        self._since: float | None = None

    @property
    def running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._since is not None

    @property
    def stretch(self) -> float:
        """Seconds since it was started; 0 while it is stopped."""
        return 0.0 if self._since is None else self._clock() - self._since

    @property
    def seconds(self) -> float:
        return self._before + self.stretch

    def start(self, at: float | None = None) -> None:
        """Start, now or at an earlier time. Has no effect while the timer runs."""
        if self._since is None:
            now = self._clock()
            self._since = now if at is None else min(at, now)

    def until(self, at: float | None) -> float:
        """Return the seconds from its start to this time, or to now."""
        return self.stretch if at is None or self._since is None else min(max(0.0, at - self._since), self.stretch)

    def stop(self, at: float | None = None) -> float:
        """Stop, now or at an earlier time, and return the seconds since the start."""
        stretch = self.until(at)
        self._before += stretch
        self._since = None
        return stretch

    def copy(self) -> Timer:
        """Return a timer with the same measured time."""
        copied = Timer(self._clock)
        copied._before, copied._since = self._before, self._since
        return copied


class TimeByCause:
    """Seconds by cause."""

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        self._seconds = dict.fromkeys(Spent, 0.0)
        for name, value in (seconds or {}).items():
            if name in self._seconds:
                self._seconds[Spent(name)] = float(value)

    def __getitem__(self, spent: Spent) -> float:
        return self._seconds[spent]

    @property
    def total(self) -> float:
        return sum(self._seconds.values())

    def add(self, spent: Spent, seconds: float) -> None:
        self._seconds[spent] += seconds

    def plus(self, other: TimeByCause) -> TimeByCause:
        return TimeByCause({spent: self[spent] + other[spent] for spent in Spent})

    def since(self, earlier: TimeByCause) -> TimeByCause:
        """Return the time that was added after `earlier`."""
        return TimeByCause({spent: self[spent] - earlier[spent] for spent in Spent})

    def to_json(self) -> dict[str, float]:
        return {str(spent): round(seconds, 6) for spent, seconds in self._seconds.items()}


ENTERING: Final = frozenset({Activity.SYNC, Activity.RESTORE})
_OUTSIDE: Final = frozenset({Activity.STARTUP, Activity.PARKED, Activity.DONE})
_STEP: Final = frozenset({Activity.COMPUTE, Activity.AVERAGE, Activity.VOTE, Activity.APPLY})
_TRAINING: Final = frozenset({Activity.DATA, *_STEP})
# The activities between two steps: their shares of the time show how efficiently the rank trains.
MEASURED: Final = (
    Activity.DATA,
    Activity.COMPUTE,
    Activity.AVERAGE,
    Activity.VOTE,
    Activity.APPLY,
    Activity.CHECKPOINT,
    Activity.EVALUATION,
)
_PLAIN: Final = {
    Activity.DATA: Spent.DATA,
    Activity.CHECKPOINT: Spent.CHECKPOINT,
    Activity.EVALUATION: Spent.EVALUATION,
}


class Ledger:
    """The accounts of one rank process: an `activity.Listener`.

    `report_to` receives a report when the rank enters a world, has its state, or leaves, and at most once per
    second in between.
    """

    def __init__(self, clock: Clock, report_to: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._clock = clock
        self._report_to = report_to
        self._reported_at = float("-inf")
        self._wall = Timer(clock)
        self._timers = {activity: Timer(clock) for activity in Activity}
        self._times = TimeByCause()
        self._open = 0.0
        self._activity = Activity.STARTUP
        self._step = 0
        self._highest = 0
        self._worlds = 0
        self._retried = False
        self._started_training = False

    def reached(self, step: int) -> None:
        """Note that the job has completed this step before: up to it, steps are recomputed."""
        self._highest = max(self._highest, step)

    def entered(self, activity: Activity, step: int) -> None:
        """`activity.Listener`.

        A step whose number increased was completed. A step that starts again after a world was discarded.
        """
        before = self._activity
        self._close(before, leaves=activity is Activity.PARKED)
        if activity in _OUTSIDE:
            self._wall.stop()
        if step != self._step:
            self._settle(step, committed=step > self._step)
        elif self._retried and activity in _TRAINING and activity is not Activity.APPLY:
            self._settle(step, committed=False)
        self._open_activity(activity, before)
        if self._due(activity, before):
            self._send_report()

    def step(self, *, step: int, committed: bool) -> None:
        """Set result and number of the step in progress where `entered` cannot detect them: for a skipped step."""
        if self._activity in _STEP:
            self._close(self._activity, leaves=False)
            self._timers[self._activity].start()
        self._settle(step, committed=committed)

    def seconds(self, activity: Activity) -> float:
        """Return the total time of an activity."""
        return self._timers[activity].seconds

    def report(self) -> dict[str, Any]:
        """Return all accounts since the first world, with the activity in progress: the launcher's `account`."""
        stretch = self._timers[self._activity].stretch
        times = self._times
        if self._activity not in _STEP | _OUTSIDE:
            times = times.plus(TimeByCause({self._spent(self._activity): stretch}))
            stretch = 0.0
        return {
            "at": self._clock(),
            "activity": str(self._activity),
            "wall": round(self._wall.seconds, 6),
            "open": round(self._open + (stretch if self._activity in _STEP else 0.0), 6),
            "seconds": times.to_json(),
            "activities": {str(activity): round(self._timers[activity].seconds, 6) for activity in MEASURED},
        }

    # Inside

    def _close(self, activity: Activity, *, leaves: bool) -> None:
        """Book the time of the activity until now."""
        if activity in _OUTSIDE:
            return
        stretch = self._timers[activity].stop()
        if activity not in _STEP:
            self._times.add(self._spent(activity), stretch)
        elif leaves and activity.waiting:
            self._times.add(Spent.DETECTION, stretch)
        else:
            self._open += stretch

    def _open_activity(self, activity: Activity, before: Activity) -> None:
        self._activity = activity
        if activity in _OUTSIDE:
            self._retried = self._retried or before not in _OUTSIDE
            return
        if before in _OUTSIDE:
            self._worlds += 1
            self._started_training = False
            self._wall.start()
        self._timers[activity].start()

    def _settle(self, step: int, *, committed: bool) -> None:
        useful = committed and step > self._highest
        self._times.add(Spent.PRODUCTIVE if useful else Spent.RECOMPUTE, self._open)
        self._open, self._step, self._retried = 0.0, step, False
        if committed:
            self.reached(step)

    def _spent(self, activity: Activity) -> Spent:
        if activity in ENTERING:
            return Spent.STARTUP if self._worlds == 1 else Spent.RESTART
        return _PLAIN[activity]

    def _due(self, activity: Activity, before: Activity) -> bool:
        if activity in _OUTSIDE:
            return before not in _OUTSIDE
        if activity in ENTERING:
            return before in _OUTSIDE
        arrived, self._started_training = not self._started_training, True
        return arrived or self._clock() - self._reported_at >= _REPORT_SECONDS

    def _send_report(self) -> None:
        if self._report_to is not None:
            self._reported_at = self._clock()
            self._report_to(self.report())


class Histogram:
    """Counts by upper bound, as in Prometheus."""

    def __init__(self, bounds: Sequence[float] = BOUNDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * len(self._bounds)
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.count += 1
        self.sum += value
        for index, bound in enumerate(self._bounds):
            self._counts[index] += value <= bound

    def to_json(self) -> dict[str, Any]:
        """Wire form; the counts are cumulative."""
        buckets = [[bound, count] for bound, count in zip(self._bounds, self._counts, strict=True)]
        return {"count": self.count, "sum": round(self.sum, 6), "buckets": buckets}


def mtbf(failures: int, exposure: float) -> float:
    """Return the estimated seconds between failures: the inverse of the mean of the rate's gamma posterior."""
    return (PRIOR_SECONDS + exposure) / (PRIOR_FAILURES + failures)
