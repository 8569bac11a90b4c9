"""The cost of each injection, from the trace of steps and the launcher's incidents. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import zip_longest
from typing import Any

from holdfast.fault_injection.step_trace import Injection, StepRecord, first_after, lost_steps


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One injection: the time until the next step that started after it, and the steps that were made again."""

    injection: Injection
    next_step: float | None
    lost: int
    counted_as: str


def costs(
    injections: Sequence[Injection], records: Sequence[StepRecord], incidents: Sequence[Mapping[str, Any]]
) -> list[Cost]:
    """Return the cost of each injection. Until the next one, incidents and steps made again are its own."""
    ordered = sorted(injections, key=lambda injection: injection.time)
    return [
        _cost(injection, following, records, incidents) for injection, following in zip_longest(ordered, ordered[1:])
    ]


def _cost(
    injection: Injection,
    following: Injection | None,
    records: Sequence[StepRecord],
    incidents: Sequence[Mapping[str, Any]],
) -> Cost:
    found = first_after(records, injection.time)
    until, until_wall = (math.inf, math.inf) if following is None else (following.time, following.wall)
    return Cost(
        injection=injection,
        next_step=None if found is None else found.time - injection.time,
        lost=lost_steps(records, injection.time, until),
        counted_as=_counted_as(injection, incidents, until_wall),
    )


def summary(costs: Sequence[Cost], *, seed: int, uses_holdfast: bool) -> str:
    """Return a table and a line below it. A script without Holdfast's loop reports no steps."""
    head = ["fault", "rank", "after step", "next step", "lost", "counted as"]
    lines = [head, *(_cells(cost, uses_holdfast=uses_holdfast) for cost in costs)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    padded = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    padded.insert(1, "  ".join("-" * width for width in widths))
    lost = (
        _number(sum(cost.lost for cost in costs), "step") + " lost"
        if uses_holdfast
        else "steps unknown: the script does not call job.step"
    )
    return "\n".join(
        [
            *(line.rstrip() for line in padded),
            "",
            f"{_number(len(costs), 'fault')}, {lost}; --seed {seed} repeats it",
        ]
    )


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _cells(cost: Cost, *, uses_holdfast: bool) -> list[str]:
    found = cost.injection
    return [
        found.kind,
        str(found.rank),
        str(found.step) if uses_holdfast else "",
        "" if not uses_holdfast else "never" if cost.next_step is None else f"{cost.next_step:.2f} s",
        str(cost.lost) if uses_holdfast else "",
        cost.counted_as,
    ]


def _counted_as(injection: Injection, incidents: Sequence[Mapping[str, Any]], until: float) -> str:
    """Return the first incident of its rank in this time, or of any rank if there is none."""
    later = [one for one in incidents if injection.wall <= _detected(one) < until]
    own = [one for one in later if one.get("rank") == injection.rank] or later
    return f"{own[0]['cause']}/{own[0]['reason']}" if own else ""


def _detected(incident: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(incident["detectedTime"]).timestamp()
