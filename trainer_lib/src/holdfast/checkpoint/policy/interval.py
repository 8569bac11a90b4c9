"""How often to commit where the job is to choose (`Auto`). Pure: every time is an argument.

J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006. If training stands
still for `stall` seconds at each commit and fails every `mtbf` seconds, then of work that takes W seconds the wall
time is proportional to (e^((t + stall) / mtbf) - 1) / t, where t is the time between two commits. It is least where

    (1 - t / mtbf) e^((t + stall) / mtbf) = 1

How long a restart takes, and how long a commit is on its way to the disk beside training, moves the wall time and not
the place of its minimum.
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
"""Until a commit has been measured."""
MOST_RETRY_SECONDS: Final = 30.0
_REMEMBERED: Final = 5
_NEWS: Final = 1.1
_ROUNDS: Final = 60


def optimum(stall: float, mtbf: float) -> float:
    """The exact minimum: seconds of work between two commits, at most `mtbf`; 0 if a commit costs nothing."""
    cost = stall / mtbf
    # Of f(x) = x + cost + log(1 - x), x = t / mtbf. Both begin right of its root, where f is below 0. f falls and is
    # concave there, so that Newton's method goes down to the root and never beyond it.
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
    """Seconds from the end of the last of so many commits that failed in a row to the next try: at once after the
    first one, then twice as long each time, up to MOST_RETRY_SECONDS."""
    return 0.0 if failed <= 1 else backoff(failed - 2, first=1.0, longest=MOST_RETRY_SECONDS)


@dataclass(frozen=True, kw_only=True)
class LauncherFailures(JsonFields):
    """What one launcher counted since it started; `id` tells it from others, and from itself after a restart."""

    id: str
    failures: int = 0
    seconds: float = 0.0

    @classmethod
    def from_optional(cls, value: Any) -> LauncherFailures | None:
        """Read the wire form; None if there is none."""
        return cls.from_json(value) if isinstance(value, Mapping) else None


@dataclass(frozen=True, kw_only=True)
class Failures(JsonFields):
    """What the job has lived through, over launchers that come and go: it travels with the state and its commits."""

    count: int = 0
    seconds: float = 0.0
    heard: LauncherFailures | None = None
    """Whose books were counted last, and what stood in them then."""

    def told(self, books: LauncherFailures | None) -> Failures:
        """Another world has lined up, and its launcher's books say this. A launcher that did not count before stands
        for one failure: whoever kept the books before it is lost."""
        if books is None:
            return self
        before = self.heard
        if before is None:
            return Failures(count=books.failures, seconds=books.seconds, heard=books)
        if before.id != books.id:
            return Failures(count=self.count + 1, seconds=self.seconds, heard=books)
        return Failures(
            count=self.count + max(0, books.failures - before.failures),
            seconds=self.seconds + max(0.0, books.seconds - before.seconds),
            heard=books,
        )

    def later(self, seconds: float) -> Failures:
        """After so long without another one."""
        heard = None if self.heard is None else replace(self.heard, seconds=self.heard.seconds + seconds)
        return Failures(count=self.count, seconds=self.seconds + seconds, heard=heard)

    @property
    def mtbf(self) -> float:
        """Seconds between two, estimated: one a day as long as little is known."""
        return mean_time_between_failures(self.count, self.seconds)

    @classmethod
    def from_optional(cls, value: Any) -> Failures:
        """Read what a commit has; nothing is known if it has none, or what is none."""
        try:
            found = cls.from_json(value)
            heard = 0.0 if found.heard is None else float(found.heard.seconds)
            sound = found.count >= 0 and 0 <= float(found.seconds) + heard < math.inf
        except (KeyError, TypeError, ValueError, OverflowError):
            return cls()
        return found if sound else cls()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An interval, and what it follows from."""

    seconds: float
    reason: str
    news: bool
    """Whether it differs from the last one that was told by so much that it is worth a line."""


class Cadence:
    """Remembers what the last commits cost, and chooses."""

    def __init__(self) -> None:
        self._stalls: deque[float] = deque(maxlen=_REMEMBERED)
        self._writes: deque[float] = deque(maxlen=_REMEMBERED)
        self._told = 0.0

    def took(self, *, stall: float, write: float) -> None:
        """A commit has ended: for so long training stood still, and so long it then took until it was durable."""
        self._stalls.append(stall)
        self._writes.append(write)

    def choose(self, mtbf: float) -> Choice:
        """Never below LEAST_SECONDS or the time that a commit takes, of which only one is on its way at a time; never
        above MOST_SECONDS but for that."""
        if not self._stalls:
            return self._chosen(FIRST_SECONDS, "no commit has been measured yet")
        stall, write = statistics.median(self._stalls), statistics.median(self._writes)
        best = optimum(stall, mtbf)
        seconds = max(LEAST_SECONDS, min(MOST_SECONDS, best), write)
        why = f"a commit stops training for {stall:.3f} s, a failure comes every {mtbf:.0f} s"
        if not math.isclose(seconds, best):
            why += f"; the optimum of {best:.1f} s is out of bounds"
        return self._chosen(seconds, why)

    def _chosen(self, seconds: float, reason: str) -> Choice:
        news = not self._told / _NEWS <= seconds <= self._told * _NEWS
        self._told = seconds if news else self._told
        return Choice(seconds=seconds, reason=reason, news=news)
