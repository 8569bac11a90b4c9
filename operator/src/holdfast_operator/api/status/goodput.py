"""What the job's time went into."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.json import Json, items, number, part
from holdfast_operator.api.status.json_fields import written
from holdfast_operator.api.times import parse_time

TimeBreakdown = tuple[int, ...]
"""Whole seconds in the order of ``constants.SPENT``; zeros at the end are left out."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Seconds of all rank places that the job ever had, over all launchers."""

    spent: TimeBreakdown = ()
    time: datetime | None = None

    @property
    def productive(self) -> int:
        """Seconds that went into steps that were kept."""
        return self.spent[0] if self.spent else 0

    @property
    def ratio(self) -> float | None:
        """Productive seconds of all that are told; None while there are none."""
        total = sum(self.spent)
        return round(self.productive / total, 3) if total else None

    def plus(self, more: TimeBreakdown) -> TimeBreakdown:
        """The sum, as far as a status can hold it."""
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
    """What was booked after ``before``. No cause ever falls, so books in which one did are a new launcher's."""
    pairs = list(zip(_long(now), _long(before), strict=True))
    return now if any(a < b for a, b in pairs) else short(a - b for a, b in pairs)


def read(value: Any) -> TimeBreakdown:
    """From a worker's entry."""
    return short(map(_seconds, items(value)[: len(c.SPENT)]))


def short(values: Any) -> TimeBreakdown:
    """Without zeros at the end."""
    kept = list(values)
    while kept and not kept[-1]:
        kept.pop()
    return tuple(kept)


def _long(spent: TimeBreakdown) -> TimeBreakdown:
    return (*spent, *(0,) * (len(c.SPENT) - len(spent)))


def _seconds(value: Any) -> int:
    return max(number(value), 0)
