"""The duration of steps, and the time in which the launcher did not run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from holdfast.core.attempt import AttemptId
from holdfast.launcher.hang.detectors.observation import Observed
from holdfast.telemetry.activity import Activity

# The number of steps that must be known for a deadline, of the world and of the process itself.
KNOWN_STEPS: Final = 5
_REMEMBERED: Final = 50
# Deadline of the first steps of a new process, relative to the slowest first step of earlier processes.
_FIRST_SECONDS: Final = 10.0
_FIRST_FACTOR: Final = 5.0


@dataclass(kw_only=True)
class Pauses:
    """The times in which the launcher did not run, because of CPU starvation or a suspended machine."""

    tick: float = 0.1
    late: float = 0.25
    _last: float | None = None
    _spans: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=64))

    def look(self, now: float) -> None:
        """Note that the launcher runs at this time."""
        if self._last is not None and now - self._last > self.late:
            self._spans.append((self._last + self.tick, now))
        self._last = now

    def awake(self, since: float, now: float) -> float:
        """Return the seconds since then in which the launcher ran."""
        return now - since - self.lost(since, now)

    def lost(self, since: float, now: float) -> float:
        """Return the seconds since then in which the launcher did not run."""
        return sum(max(0.0, min(end, now) - max(start, since)) for start, end in self._spans)


@dataclass(kw_only=True)
class Pace:
    """The duration of steps by world size, and of the first steps of processes."""

    _steps: dict[int, deque[float]] = field(default_factory=dict)
    _base: tuple[AttemptId, int, int, float | None] | None = None  # attempt ID, slot, step, its time if observed
    _starting: dict[int, float] = field(default_factory=dict)  # by slot: the longest of its first steps so far
    _first: float | None = None

    def note(self, seen: Observed, now: float) -> None:
        """Add the steps that the ranks made since the last look."""
        self._note_first(seen, now)
        if not seen.ranks_here:
            return
        leader = min(seen.ranks_here, key=lambda rank_here: rank_here.rank)
        key, at = (seen.attempt_id, leader.slot), leader.reading
        if self._base is None or self._base[:2] != key:
            self._base = (*key, at.step, None)
        elif at.step > self._base[2]:
            _, _, step, since = self._base
            if since is not None:
                known = self._steps.setdefault(seen.world_size, deque(maxlen=_REMEMBERED))
                made = at.step - step  # several steps between two looks count with their mean duration
                known.extend([(at.stepped - since) / made] * min(made, _REMEMBERED))
            self._base = (*key, at.step, at.stepped)

    def median(self, world_size: int) -> float | None:
        """Return the median step time of this world size; without one, an estimate from other sizes; else None."""
        known = {size: median(steps) for size, steps in self._steps.items() if len(steps) >= KNOWN_STEPS}
        if world_size in known:
            return known[world_size]
        return max((value * max(1.0, size / world_size) for size, value in known.items()), default=None)

    def first(self, startup: float, floor: float) -> float:
        """Return the deadline of a first step in seconds."""
        if self._first is None:
            return startup
        return min(startup, max(_FIRST_SECONDS, floor, _FIRST_FACTOR * self._first))

    def _note_first(self, seen: Observed, now: float) -> None:
        starting: dict[int, float] = {}
        for rank_here in seen.ranks_here:
            took, reading = self._starting.get(rank_here.slot, 0.0), rank_here.reading
            if reading.made >= KNOWN_STEPS:
                self._first = max(self._first or 0.0, took)
            elif reading.activity is Activity.COMPUTE:
                starting[rank_here.slot] = max(took, now - reading.since)
            else:
                starting[rank_here.slot] = took
        self._starting = starting
