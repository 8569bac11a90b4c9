"""Random traces over all tiers with outages and corruption: no checkpoint that Holdfast has acknowledged may be lost.

The invariants are those of `tests/holdfast/model/tiers.py`. The same seed gives the same traces.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "holdfast" / "model"))

from explorer import Found, explore, shrink, workplace
from tier_ledger import Counts

PROGRESS_SECONDS = 30.0
_AT_ONCE = 20


@dataclass
class Explored:
    """The number of traces, and the shortest one that violates an invariant."""

    traces: int = 0
    counts: Counts = field(default_factory=Counts)
    found: Found | None = None

    def __str__(self) -> str:
        counts = self.counts
        rules = ", ".join(f"{name} {number}" for name, number in sorted(counts.rules.items()))
        return (
            f"{self.traces} traces, {sum(counts.rules.values())} steps ({rules}); {counts.outages} outages, "
            f"{counts.saves} checkpoints saved, {counts.uploads} uploaded, {counts.deleted} deleted, "
            f"{counts.restores} restores, {counts.refused} starts refused"
        )


def drill(*, seed: int, first: int, traces: int | None, until: float, say: Callable[[str], None]) -> Explored:
    """Run traces until one violates an invariant, their number is reached, or the time is over."""
    explored, told = Explored(), time.monotonic()
    say(f"  seed {seed}, from trace {first} on")
    with workplace() as folder:
        while explored.traces != traces and time.monotonic() < until:
            count = _AT_ONCE if traces is None else min(_AT_ONCE, traces - explored.traces)
            begin = first + explored.traces
            met = explore(folder, seed, range(begin, begin + count), explored.counts)
            if met is not None:
                number, found = met
                explored.traces = number - first + 1
                say(f"  trace {number} of seed {seed} violates an invariant: {found.message}; it is made shorter")
                explored.found = shrink(folder, found)
                say(f"  {explored.found}")
                break
            explored.traces += count
            if time.monotonic() - told >= PROGRESS_SECONDS:
                told = time.monotonic()
                say(f"  {explored}")
    say(f"  {explored}")
    return explored
