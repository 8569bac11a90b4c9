"""The checkpoint interval for jobs that leave the choice to Holdfast (`Auto`). Pure: every time is an argument.

The source is J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006.
Training stops for `stall` seconds at each checkpoint, and fails every `mtbf` seconds. Let t be the time between two
checkpoints. For a given amount of work, the wall time is proportional to (e^((t + stall) / mtbf) - 1) / t. The
minimum is at

    (1 - t / mtbf) e^((t + stall) / mtbf) = 1

The duration of a restart and the duration of the asynchronous write change the wall time, but not the place of its
minimum.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from holdfast.core.json_fields import JsonFields
from holdfast.core.limits import backoff
from holdfast.telemetry.rank_time import mtbf as mean_time_between_failures

LEAST_SECONDS: Final = 10.0
MOST_SECONDS: Final = 1800.0
FIRST_SECONDS: Final = 60.0
"""The interval in seconds until a checkpoint has been measured."""
MOST_RETRY_SECONDS: Final = 30.0
_REMEMBERED: Final = 5
_CHANGE_FACTOR: Final = 1.1
_ROUNDS: Final = 60


def optimum(stall: float, mtbf: float) -> float:
    """Return the exact minimum: seconds of work between two checkpoints, at most `mtbf`; 0 if a
    checkpoint is free.
    """
    cost = stall / mtbf
    # Let f(x) = x + cost + log(1 - x), with x = t / mtbf. Both starting points are to the right of its root, where f
    # is negative, decreasing and concave. Newton's method therefore descends to the root and never passes it.
    x = min(math.sqrt(2 * cost), -math.expm1(-1 - cost))
    for _ in range(_ROUNDS):
        if not 0 < x < 1:
            break
        better = x + (x + cost + math.log1p(-x)) * (1 - x) / x
        if not 0 < better < x:
            break
        x = better
    return min(x, 1.0) * mtbf


def retry_after(failed: int) -> float:
    """Return the seconds from the last of `failed` consecutive failed checkpoints to the next try.

    The first retry is immediate. After that, the wait doubles each time, up to `MOST_RETRY_SECONDS`.
    """
    return 0.0 if failed <= 1 else backoff(failed - 2, first=1.0, longest=MOST_RETRY_SECONDS)


@dataclass(frozen=True, kw_only=True)
class LauncherFailures(JsonFields):
    """What one launcher counted since it started. `id` identifies the launcher process: a restart changes it."""

    id: str
    failures: int = 0
    seconds: float = 0.0

    @classmethod
    def from_optional(cls, value: Any) -> LauncherFailures | None:
        """Parse the wire form; return None if `value` is not a mapping."""
        return cls.from_json(value) if isinstance(value, Mapping) else None


@dataclass(frozen=True, kw_only=True)
class Failures(JsonFields):
    """The failures of the job, across changing launchers.

    The state in memory and its checkpoints carry them along.
    """

    count: int = 0
    seconds: float = 0.0
    heard: LauncherFailures | None = None
    """The launcher counters that were counted last."""

    def with_counters(self, counters: LauncherFailures | None) -> Failures:
        """Return the failures after a new world has formed, whose launcher reports these counters.

        A launcher that did not count before counts as one failure: the launcher that counted until then is lost.
        """
        if counters is None:
            return self
        before = self.heard
        if before is None:
            return Failures(count=counters.failures, seconds=counters.seconds, heard=counters)
        if before.id != counters.id:
            return Failures(count=self.count + 1, seconds=self.seconds, heard=counters)
        return Failures(
            count=self.count + max(0, counters.failures - before.failures),
            seconds=self.seconds + max(0.0, counters.seconds - before.seconds),
            heard=counters,
        )

    def later(self, seconds: float) -> Failures:
        """Return the failures after this many seconds without another one."""
        counted = None if self.heard is None else replace(self.heard, seconds=self.heard.seconds + seconds)
        return Failures(count=self.count, seconds=self.seconds + seconds, heard=counted)

    @property
    def mtbf(self) -> float:
        """The estimated seconds between two failures. As long as little is known, the estimate is one per day."""
        return mean_time_between_failures(self.count, self.seconds)

    @classmethod
    def from_optional(cls, value: Any) -> Failures:
        """Parse what a checkpoint has. Return the default if it has nothing, or nothing valid."""
        try:
            found = cls.from_json(value)
            counted = 0.0 if found.heard is None else float(found.heard.seconds)
            sound = found.count >= 0 and 0 <= float(found.seconds) + counted < math.inf
        except (KeyError, TypeError, ValueError, OverflowError):
            return cls()
        return found if sound else cls()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An interval in seconds, and the reason for it."""

    seconds: float
    reason: str
    changed: bool
    """Whether the interval differs enough from the last reported one to log it."""


class IntervalChooser:
    """Records the costs of the last checkpoints, and chooses the interval."""

    def __init__(self) -> None:
        self._stalls: deque[float] = deque(maxlen=_REMEMBERED)
        self._writes: deque[float] = deque(maxlen=_REMEMBERED)
        self._reported = 0.0

    def record(self, *, stall: float, write: float) -> None:
        """Record a checkpoint: the seconds for which training stopped, and the seconds until it was durable."""
        self._stalls.append(stall)
        self._writes.append(write)

    def choose(self, mtbf: float) -> Choice:
        """Choose an interval of at least `LEAST_SECONDS`, and at least the time that a checkpoint takes.

        Only one checkpoint is written at a time. Apart from that, the interval is at most `MOST_SECONDS`.
        """
        if not self._stalls:
            return self._chosen(FIRST_SECONDS, "no checkpoint has been measured yet")
        stall, write = statistics.median(self._stalls), statistics.median(self._writes)
        best = optimum(stall, mtbf)
        seconds = max(LEAST_SECONDS, min(MOST_SECONDS, best), write)
        why = f"a checkpoint stops training for {stall:.3f} s, a failure occurs every {mtbf:.0f} s"
        if not math.isclose(seconds, best):
            why += f"; the optimum of {best:.1f} s is out of bounds"
        return self._chosen(seconds, why)

    def _chosen(self, seconds: float, reason: str) -> Choice:
        changed = not self._reported / _CHANGE_FACTOR <= seconds <= self._reported * _CHANGE_FACTOR
        self._reported = seconds if changed else self._reported
        return Choice(seconds=seconds, reason=reason, changed=changed)
