"""The use of the job's time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.json import Json, items, number, part
from holdfast_operator.api.status.json_fields import written
from holdfast_operator.api.times import parse_time

TimeBreakdown = tuple[int, ...]
"""Whole seconds in the order of ``constants.SPENT``; trailing zeros are omitted."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Seconds of all ranks that the job ever had, summed over all launchers."""

    spent: TimeBreakdown = ()
    time: datetime | None = None

    @property
    def productive(self) -> int:
        """Seconds of steps that were kept."""
        return self.spent[0] if self.spent else 0

    @property
    def ratio(self) -> float | None:
        """The share of productive seconds in all reported ones; None without any."""
        total = sum(self.spent)
        return round(self.productive / total, 3) if total else None

    def plus(self, more: TimeBreakdown) -> TimeBreakdown:
        """Return the sum, limited to what a status can hold."""
        return short(min(a + b, c.MAX_NUMBER) for a, b in zip(_long(self.spent), _long(more), strict=True))

    def to_json(self) -> dict[str, Any]:
        return {
            "ratio": self.ratio,
            "productiveSeconds": self.productive,
            "lostSeconds": {name: value for name, value in zip(c.SPENT[1:], self.spent[1:], strict=False) if value},
            "time": written(self.time),
        }

    @classmethod
    def from_json(cls, value: Json) -> Goodput:
        lost = part(value, "lostSeconds")
        told = [value.get("productiveSeconds"), *(lost.get(name) for name in c.SPENT[1:])]
        return cls(spent=short(map(_seconds, told)), time=parse_time(value.get("time")))


def since(now: TimeBreakdown, before: TimeBreakdown) -> TimeBreakdown:
    """Return what was added after ``before``. No category ever decreases, so a decrease means a new launcher."""
    pairs = list(zip(_long(now), _long(before), strict=True))
    return now if any(a < b for a, b in pairs) else short(a - b for a, b in pairs)


def read(value: Any) -> TimeBreakdown:
    """Parse a worker's entry."""
    return short(map(_seconds, items(value)[: len(c.SPENT)]))


def short(values: Any) -> TimeBreakdown:
    """Return the values without trailing zeros."""
    kept = list(values)
    while kept and not kept[-1]:
        kept.pop()
    return tuple(kept)


def _long(spent: TimeBreakdown) -> TimeBreakdown:
    return (*spent, *(0,) * (len(c.SPENT) - len(spent)))


def _seconds(value: Any) -> int:
    return max(number(value), 0)
