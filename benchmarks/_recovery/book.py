"""The contests of the recovery benchmark and all of their figures."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import _bench as bench

from _recovery import contenders as c

ROUNDS = 25
HANGS = {
    "stop": "SIGSTOP in a collective",
    "sleep": "a rank asleep in its loss function",
    "gil": "the GIL held in C",
    "mismatch": "collectives that do not match",
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One fault. An event that never came counts as occurring at the end of the wait."""

    seconds: float  # to the next step
    resumed: bool
    lost: int = 0
    detected: float = math.nan  # until the hung victim was killed, or released


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A contender and the faults that each of its sessions has."""

    key: str
    job: type[c.Job]
    faults: tuple[str, ...]
    patience: float = 30.0  # seconds to wait for the next step
    every: int = 1  # runs in each n-th round
    warm_up: bool = True


class Book:
    """All figures by round and key, kept across runs with `--full`."""

    def __init__(self, effort: bench.Effort) -> None:
        self._trials = bench.Trials("recovery", effort)
        self.round = 0
        self.without_torchft = "not in --quick" if effort.quick else c.torchft_is_here()

    def note(self, key: str, value: float) -> None:
        """Add a figure to this round."""
        self._trials.keep(f"{self.round} {key}", value)

    def keep(self, contest: Contest, fault: str, trial: Trial) -> None:
        """Add a trial to this round."""
        key = f"{contest.key} {fault}"
        self.note(f"{key} seconds", trial.seconds)
        self.note(f"{key} resumed", float(trial.resumed))
        self.note(f"{key} lost", float(trial.lost))
        self.note(f"{key} detected", trial.detected)

    def in_round(self, number: int, key: str) -> list[float]:
        """Return the figures of one round."""
        return self._trials.collect(f"{number} {key}", 0, lambda: math.nan)

    def of(self, key: str) -> list[float]:
        """Return the figures of all rounds."""
        return [value for number in range(ROUNDS) for value in self.in_round(number, key)]

    def times_faster(self, ours: str, theirs: str) -> list[float]:
        """Return the ratios of their time to ours, within each round."""
        return [
            statistics.median(others) / own
            for number in range(ROUNDS)
            for own in self.in_round(number, ours)
            if (others := self.in_round(number, theirs))
        ]
