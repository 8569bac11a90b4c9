"""What launchers tell each other of ranks that have been at one thing for long, so that each can judge a whole world.

Pure. Clocks of hosts differ, so only durations are said, and a word counts from when it came: that is later than it
was said, and nobody is taken for having waited longer than it did. What is so no longer is said no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from holdfast.core.attempt import AttemptId
from holdfast.core.json_fields import JsonFields
from holdfast.telemetry.activity import Activity


@dataclass(frozen=True, kw_only=True)
class Stall(JsonFields):
    """A rank that has done the same for most of its deadline, or shows no sign of life. Said once, and then meant
    until it is taken back: `seconds` is for how long it had been so by then."""

    pair: AttemptId
    rank: int
    activity: Activity
    step: int
    silent: bool
    seconds: float
    deadline: float

    @property
    def waits(self) -> bool:
        """Whether it is alive in a collective, so that its end is in other hands."""
        return in_collective(self.activity) and not self.silent


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """What the other launchers of an attempt say. `unheard`: one of them was not heard just now, so it may be
    otherwise there by now."""

    stalls: tuple[Stall, ...] = ()
    unheard: bool = False


NOBODY: Final = Elsewhere()


class Hearsay:
    """For how long things have been so elsewhere."""

    def __init__(self) -> None:
        self._came: dict[Stall, float] = {}

    def note(self, stalls: Iterable[Stall], now: float) -> None:
        """This is what others say at present."""
        self._came = {stall: self._came.get(stall, now) for stall in stalls}

    def seconds(self, stall: Stall, awake: Callable[[float, float], float], now: float) -> float:
        """At least so long; `awake` tells how much of a time counts."""
        return stall.seconds + awake(self._came[stall], now)


def in_collective(activity: Activity) -> bool:
    """Whether a rank that does this waits for other ranks of its world."""
    return activity.waiting and activity is not Activity.PARKED
