"""The reports between launchers on long activities of ranks, so that each launcher can judge a whole world. Pure.

Clocks of hosts differ, so a report contains durations only and counts from its arrival. The arrival is later than the
sending, so no rank appears to have waited longer than it did. A report that no longer applies is no longer sent.
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
    """A rank whose activity has taken most of its deadline, or that shows no sign of life.

    It is reported once and applies until it is withdrawn. `seconds` is the duration at the time of the report.
    `progresses`: the rank computes for long, but uses its CPU, so other ranks may wait for it.
    """

    attempt_id: AttemptId
    rank: int
    activity: Activity
    step: int
    silent: bool
    seconds: float
    deadline: float
    progresses: bool = False

    @property
    def waits(self) -> bool:
        """Whether the rank is alive in a collective, whose end depends on other ranks."""
        return in_collective(self.activity) and not self.silent


@dataclass(frozen=True, kw_only=True)
class RemoteStalls:
    """The reports of the other launchers. `outdated`: one has stopped reporting, so its report may be outdated."""

    stalls: tuple[Stall, ...] = ()
    outdated: bool = False


NO_REMOTE_STALLS: Final = RemoteStalls()


class ReportedSeconds:
    """The time since which each report of another launcher applies."""

    def __init__(self) -> None:
        self._came: dict[Stall, float] = {}

    def note(self, stalls: Iterable[Stall], now: float) -> None:
        """Set the current reports of the other launchers."""
        self._came = {stall: self._came.get(stall, now) for stall in stalls}

    def seconds(self, stall: Stall, awake: Callable[[float, float], float], now: float) -> float:
        """Return the minimum duration in seconds; `awake` returns how much of a time span counts."""
        return stall.seconds + awake(self._came[stall], now)


def in_collective(activity: Activity) -> bool:
    """Whether a rank with this activity waits for other ranks of its world."""
    return activity.waiting and activity is not Activity.PARKED
