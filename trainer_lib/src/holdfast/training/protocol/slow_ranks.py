"""The ranks for which the others wait: a robust comparison of the ranks' own time per step. Pure.

A rank is slow if its own time is an outlier for a minute, and delays the steps noticeably. Ranks with larger parts of
the batch work longer, so a rank must be an outlier per sample as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any, Final

from holdfast.telemetry.step_pace import StepPace

# Relative to the median rank. The second one ends the report, so that it does not alternate.
SLOW_RATIO: Final = 1.5
NORMAL_RATIO: Final = 1.25
# The usual bound of the modified z-score, and the factor from the median deviation to a standard deviation.
_Z_SCORE: Final = 3.5
_DEVIATION: Final = 1.4826
# The part of a step that the delay must take.
_DELAY: Final = 0.1
PERSISTS_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 5.0
MAX_REPORTED: Final = 16


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A slow rank, with its own seconds per step and those of the median rank when it was found."""

    rank: int
    seconds: float
    median_seconds: float
    activity: str

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "seconds": round(self.seconds, 6),
            "medianSeconds": round(self.median_seconds, 6),
            "activity": self.activity,
        }


class SlowRanks:
    """The slow ranks of one world."""

    def __init__(self) -> None:
        self._looked = float("-inf")
        self._since: dict[int, float] = {}
        self._found: dict[int, SlowRank] = {}

    def due(self, now: float) -> bool:
        """Return whether the next look is due."""
        return now - self._looked >= LOOK_SECONDS

    def look(self, paces: Sequence[StepPace], now: float) -> tuple[SlowRank, ...] | None:
        """Return the first slow ranks if they have changed, else None. `paces` has all ranks of the world."""
        self._looked = now
        known = {rank: pace for rank, pace in enumerate(paces) if pace.known}
        own = {rank: pace.own for rank, pace in known.items()}
        each = {rank: pace.own / pace.weight for rank, pace in known.items()}
        slow = _outliers(own) & _outliers(each) & _delaying(known)
        late = _above(own, NORMAL_RATIO) & _above(each, NORMAL_RATIO)
        self._since = {rank: self._since.get(rank, now) for rank in slow}
        found = {rank: one for rank, one in self._found.items() if rank in late}
        for rank, since in self._since.items():
            if rank not in found and now - since >= PERSISTS_SECONDS:
                found[rank] = _slow_rank(rank, known[rank], median_low(own.values()))
        changed, self._found = found.keys() != self._found.keys(), found
        return tuple(found[rank] for rank in sorted(found)[:MAX_REPORTED]) if changed else None


def _above(values: Mapping[int, float], ratio: float) -> set[int]:
    if not values:
        return set()
    middle = median_low(values.values())
    return {rank for rank, value in values.items() if value >= ratio * middle}


def _outliers(values: Mapping[int, float]) -> set[int]:
    """Return the ranks far above the others. Of two ranks, only the ratio is known."""
    if not values:
        return set()
    middle = median_low(values.values())
    spread = _DEVIATION * median_low(abs(value - middle) for value in values.values())
    return {rank for rank in _above(values, SLOW_RATIO) if values[rank] - middle >= _Z_SCORE * spread}


def _delaying(paces: Mapping[int, StepPace]) -> set[int]:
    """Return the ranks whose delay takes a noticeable part of the step."""
    if not paces:
        return set()
    middle = median_low(pace.own for pace in paces.values())
    step = max(pace.own + pace.waiting for pace in paces.values())
    return {rank for rank, pace in paces.items() if pace.own - middle >= _DELAY * step}


def _slow_rank(rank: int, pace: StepPace, middle: float) -> SlowRank:
    activity = "data" if pace.data > pace.compute else "compute"
    return SlowRank(rank=rank, seconds=pace.own, median_seconds=middle, activity=activity)
