"""The demo's promises and its table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CostLimit:
    """A fault and its maximum cost."""

    fault: str
    seconds: float  # to the next step that its victim had no part in
    size: int | None = None  # of the world that makes that step; None: any


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The cost of a fault; None for a missing value."""

    expected: CostLimit
    noticed: float | None = None
    next_step: float | None = None
    lost: int | None = None

    @property
    def held(self) -> bool:
        """Whether the promise was kept."""
        return self.next_step is not None and self.next_step <= self.expected.seconds and self.lost == 0


@dataclass(frozen=True, kw_only=True)
class Check:
    """A condition at the end."""

    what: str
    held: bool


def table(outcomes: Sequence[Outcome], checks: Sequence[Check]) -> str:
    """Return the table, and below it the other checks."""
    head = ["fault", "noticed", "next step", "promised", "lost", "promised", "held"]
    lines = [head, *map(_cells, outcomes)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    padded = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    padded.insert(1, "  ".join("-" * width for width in widths))
    conditions = [f"{_yes(check.held)}  {check.what}" for check in checks]
    return "\n".join([*(line.rstrip() for line in padded), "", *conditions])


def held(outcomes: Sequence[Outcome], checks: Sequence[Check]) -> bool:
    """Whether every promise was kept."""
    return all(one.held for one in outcomes) and all(check.held for check in checks)


def _cells(one: Outcome) -> list[str]:
    return [
        one.expected.fault,
        _seconds(one.noticed),
        _seconds(one.next_step) if one.next_step is not None else "never",
        f"<= {one.expected.seconds:g} s",
        "?" if one.lost is None else str(one.lost),
        "0",
        _yes(one.held),
    ]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def _yes(value: bool) -> str:
    return "yes" if value else "NO "
