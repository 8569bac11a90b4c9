"""The launcher's accounts: the use of every second of every rank slot. Pure: the clock is a parameter.

A rank reports its own time in a world (`telemetry.rank_time.Ledger`). This module measures the rest with its own
stopwatches.

- `startup`: from the launcher's start to the first world of a slot.
- `restart`: between worlds.
- `idle`: while the world lacks workers.
- The last stretch of a killed process, which could not report it.

The wall time is measured separately. The part of the wall time that no cause explains is `unattributed`. A message
counts from the time at which it was sent, even if this launcher reads it later: all processes of a pod share
`CLOCK_MONOTONIC`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

from holdfast.checkpoint.policy.interval import LauncherFailures as FailureBooks
from holdfast.launcher.membership.state import Phase
from holdfast.telemetry.activity import Activity
from holdfast.telemetry.rank_time import ENTERING, MEASURED, Clock, Histogram, Spent, TimeByCause, Timer, mtbf

_WAITS_FOR_OTHERS: Final = frozenset({Phase.WAITING, Phase.AWAITING_FENCE})


class RankSlotClock:
    """One slot for a rank in this launcher, whichever process holds the slot."""

    def __init__(self, clock: Clock, *, idle: bool) -> None:
        self._clock = clock
        self._idle = idle
        self.wall = Timer(clock)
        self.times = TimeByCause()
        self.pid: int | None = None  # None while no process of a world holds the slot
        self.trained = False
        self.open = 0.0
        self._outside = {spent: Timer(clock) for spent in (Spent.STARTUP, Spent.RESTART, Spent.IDLE)}
        self._unreported = Timer(clock)
        self._arrived = False
        self._stepped_at: float | None = None
        self.wall.start()
        self._wait()

    def copy(self) -> RankSlotClock:
        """Return a slot with the same past, for a slot that was empty as long as this one."""
        copied = RankSlotClock(self._clock, idle=self._idle)
        copied.wall = self.wall.copy()
        copied._outside = {spent: timer.copy() for spent, timer in self._outside.items()}
        return copied

    @property
    def silent(self) -> float:
        """Seconds in a world that the process has not reported yet."""
        return self._unreported.stretch

    def view(self) -> TimeByCause:
        """All time that is booked until now."""
        return self.times.plus(TimeByCause({spent: timer.seconds for spent, timer in self._outside.items()}))

    def waits(self, *, idle: bool) -> None:
        """Set whether the world lacks workers: the reason for which an empty slot waits."""
        self._idle = idle
        if self._waiting:
            self._wait()

    def take(self, pid: int) -> None:
        """Assign this slot to a process, which starts its own accounts a little later."""
        self.wall.start()
        self._wait()
        self.pid, self._arrived = pid, False

    def add_report(self, spent: TimeByCause, report: Mapping[str, Any]) -> None:
        """Add what the process reported to its accounts."""
        activity = Activity(report["activity"])
        self.times = self.times.plus(spent)
        at = report.get("at")
        self._end_wait(at)
        self._set_unreported(float(report["open"]), at)
        if activity is Activity.PARKED:
            self.leave(at)
        elif activity is Activity.DONE:
            self._forget()
            self.wall.stop(at)
        elif activity not in ENTERING:
            self.trained = self._arrived = True

    def stepped(self, at: float | None) -> None:
        """The process completed a step at this time of the shared clock."""
        self._stepped_at = self._unreported.until(at)

    def lost(self, *, hung: bool, blamed_at: float | None = None) -> None:
        """Book the last stretch of a process that ended before it reported that stretch.

        The time after its last step is lost. For a hang, the time from the verdict to the end of the process belongs
        to the recovery: the launcher saves the stacks in between.
        """
        if self._waiting:
            self._forget()
            return
        at = blamed_at if hung else None
        useful = 0.0 if self._stepped_at is None else self._stepped_at + self.open
        wasted = max(0.0, self._unreported.until(at) + self.open - useful)
        self.times.add(Spent.PRODUCTIVE, useful)
        if not self._arrived:
            self.times.add(self._between, wasted)
        else:
            self.times.add(Spent.DETECTION if hung else Spent.RECOMPUTE, wasted)
        self.leave(at)

    def leave(self, at: float | None = None) -> None:
        """The process is no longer in a world."""
        self._forget()
        self._wait(at)

    @property
    def _between(self) -> Spent:
        return Spent.RESTART if self.trained else Spent.STARTUP

    @property
    def _waiting(self) -> bool:
        return any(timer.running for timer in self._outside.values())

    def _set_unreported(self, still_open: float, at: float | None) -> None:
        self._unreported.stop()
        self._unreported.start(at)
        self._stepped_at, self.open = None, still_open

    def _forget(self) -> None:
        self._unreported.stop()
        self.pid, self.open, self._stepped_at = None, 0.0, None

    def _wait(self, at: float | None = None) -> None:
        spent = Spent.IDLE if self._idle else self._between
        if not self._outside[spent].running:
            self._end_wait(at)
            self._outside[spent].start(at)

    def _end_wait(self, at: float | None = None) -> None:
        for timer in self._outside.values():
            timer.stop(at)


@dataclass(kw_only=True)
class _Process:
    """The last report of a process that uses Holdfast's loop."""

    times: TimeByCause = field(default_factory=TimeByCause)
    activities: Mapping[str, float] = field(default_factory=dict)
    replaces: bool = False  # its start is part of a recovery


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The time from the last progress before a failure to the first step after it, in phases."""

    cause: str
    seconds: Mapping[str, float]


@dataclass(kw_only=True)
class _Failed:
    cause: str
    progress: float
    detected: float
    entered: float | None = None
    restored: float | None = None


class GoodputAccounts:
    """The accounts of all ranks of one launcher."""

    def __init__(self, clock: Clock) -> None:
        self._id = uuid4().hex
        self._clock = clock
        self._exposure = Timer(clock)
        self._exposure.start()
        self._empty = RankSlotClock(clock, idle=False)
        self._slots: dict[int, RankSlotClock] = {}
        self._processes: dict[int, _Process] = {}
        self._standbys: dict[int, Timer] = {}
        self._standby = 0.0
        self._progress = clock()
        self._failed: _Failed | None = None
        self._blamed_at: float | None = None  # in the attempt that the ranks are in
        self._activities = dict.fromkeys(map(str, MEASURED), 0.0)
        self._recoveries: dict[tuple[str, str], Histogram] = {}
        self._any_report = False
        self._step: int | None = None
        self._lines_up = True  # no rank has reported yet from which step the attempt continues
        self.highest = 0
        self.steps = 0
        self.lost_steps = 0
        self.failures = 0

    def phase(self, phase: Phase) -> None:
        """Set the launcher's phase."""
        for slot in (self._empty, *self._slots.values()):
            slot.waits(idle=phase in _WAITS_FOR_OTHERS)

    def standby(self, pid: int) -> None:
        """A process runs the script and is on standby for a world."""
        timer = self._standbys[pid] = Timer(self._clock)
        timer.start()

    def hello(self, pid: int, local_rank: int) -> None:
        """A process entered a world in this slot."""
        self._end_standby(pid)
        before = self._slot(pid)
        if before is not None:  # the process lives and reports its time in the new slot itself
            before.leave()
        slot = self._slots.setdefault(local_rank, self._empty.copy())
        if slot.pid is not None:
            slot.lost(hung=False)
        self._processes.setdefault(pid, _Process(replaces=slot.trained))
        slot.take(pid)
        self._lines_up, self._blamed_at = True, None
        if self._failed is not None:
            self._failed.entered, self._failed.restored = self._clock(), None

    def account(self, pid: int, report: Mapping[str, Any]) -> None:
        """Add the accounts that a process reported."""
        process = self._processes.setdefault(pid, _Process())
        times = TimeByCause(report["seconds"])
        added, process.times = times.since(process.times), times
        self._measure(process, report.get("activities") or {})
        slot = self._slot(pid)
        if slot is None:
            return
        self._any_report = True
        slot.add_report(_again(added) if process.replaces else added, report)

    def restored(self, step: int) -> None:
        """A rank has its state, at `step`.

        Steps that were completed after it are lost. Only the first report of an attempt counts, because the others
        may arrive after the next step.
        """
        if self._lines_up:
            self.lost_steps += max(0, (self._step or 0) - step)
            self._step, self._lines_up = step, False
        if self._failed is not None:
            self._failed.restored = self._clock()

    def stepped(self, pid: int, step: int, at: float | None = None) -> Recovery | None:
        """Record a completed step of a rank. The first step after a failure ends the recovery, which is returned."""
        slot = self._slot(pid)
        if slot is not None:
            slot.stepped(at)
        if step == self._step:
            return None
        self.steps += 1
        self._step, self._progress = step, self._clock()
        self.highest = max(self.highest, step)
        return self._recovered()

    def failed(self, cause: str, reached: int | None = None) -> None:
        """An attempt failed, on any worker. A failure before its first step extends the current recovery."""
        self.failures += 1
        self._blamed_at = self._clock()
        self.highest = max(self.highest, reached or 0)
        if self._failed is None:
            self._failed = _Failed(cause=cause, progress=self._progress, detected=self._clock())

    def ended(self, pid: int, *, hung: bool) -> None:
        """A process ended; `hung`: this launcher ended it because it hung."""
        self._end_standby(pid)
        slot = self._slot(pid)
        if slot is not None:
            slot.lost(hung=hung, blamed_at=self._blamed_at)
        self._processes.pop(pid, None)

    @property
    def failure_counters(self) -> FailureBooks:
        """The number of failed attempts, and the time in which they occurred."""
        return FailureBooks(id=self._id, failures=self.failures, seconds=self._exposure.seconds)

    def to_json(self) -> dict[str, Any] | None:
        """Return `accounting` of the status; None until a rank has reported its accounts."""
        if not self._any_report:
            return None
        slots = list(self._slots.values())
        times = TimeByCause()
        for slot in slots:
            times = times.plus(slot.view())
        wall = sum(slot.wall.seconds for slot in slots)
        pending = sum(slot.silent + slot.open for slot in slots)
        return {
            "wallSeconds": round(wall, 6),
            "pendingSeconds": round(pending, 6),
            "unattributedSeconds": round(wall - pending - times.total, 6),
            "standbySeconds": round(self._standby + sum(timer.seconds for timer in self._standbys.values()), 6),
            "seconds": times.to_json(),
            "activities": {activity: round(seconds, 6) for activity, seconds in self._activities.items()},
            "steps": self.steps,
            "lostSteps": self.lost_steps,
            "failures": self.failures,
            "mtbfSeconds": round(mtbf(self.failures, self._exposure.seconds), 3),
            "recoveries": [
                {"phase": phase, "cause": cause, **known.to_json()}
                for (phase, cause), known in sorted(self._recoveries.items())
            ],
        }

    def _measure(self, process: _Process, activities: Mapping[str, Any]) -> None:
        known = {name: float(seconds) for name, seconds in activities.items() if name in self._activities}
        for name, seconds in known.items():
            self._activities[name] += seconds - process.activities.get(name, 0.0)
        process.activities = known

    def _recovered(self) -> Recovery | None:
        failed, now = self._failed, self._clock()
        if failed is None or failed.entered is None or failed.restored is None:
            return None  # a step that resolves a prepared step belongs to the attempt before: no rank trains yet
        marks = (failed.progress, failed.detected, failed.entered, failed.restored, now)
        names = ("detection", "restart", "sync", "step")
        seconds = {name: marks[i + 1] - marks[i] for i, name in enumerate(names)}
        for name, value in seconds.items():
            self._recoveries.setdefault((name, failed.cause), Histogram()).observe(value)
        self._failed = None
        return Recovery(cause=failed.cause, seconds=seconds)

    def _slot(self, pid: int) -> RankSlotClock | None:
        return next((slot for slot in self._slots.values() if slot.pid == pid), None)

    def _end_standby(self, pid: int) -> None:
        timer = self._standbys.pop(pid, None)
        if timer is not None:
            self._standby += timer.seconds


def _again(times: TimeByCause) -> TimeByCause:
    """Book the startup of a replacement process as part of the recovery."""
    entering = TimeByCause({Spent.STARTUP: times[Spent.STARTUP]})
    return times.since(entering).plus(TimeByCause({Spent.RESTART: times[Spent.STARTUP]}))
