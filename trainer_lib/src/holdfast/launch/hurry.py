"""What a worker that must leave can still commit where. Pure: speeds were measured, the notice is an argument.

A notice is a promise of others, and a disk or a network that everybody presses at once is slower than it was. So only
what is predicted to be done within 60 % of the notice is counted on.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.errors import UsageError

SHARE: Final = 0.6
_REMEMBERED: Final = 5


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Where commits go: how many bytes, and how fast it took them. One with a `source` begins when that has them.

    A speed of None was never measured.
    """

    name: str
    nbytes: int
    bytes_per_second: float | None
    source: str = ""

    def __post_init__(self) -> None:
        if self.nbytes < 0 or (self.bytes_per_second is not None and self.bytes_per_second <= 0):
            raise UsageError(f"tier {self.name}: {self.nbytes} bytes at {self.bytes_per_second} a second")

    @property
    def seconds(self) -> float | None:
        """How long it takes by itself."""
        return None if self.bytes_per_second is None else self.nbytes / self.bytes_per_second


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The tiers to commit to, in their order, and why these."""

    tiers: tuple[str, ...]
    reason: str
    certain: bool
    """Whether at least one of them is predicted to be done in time."""


def plan(tiers: Sequence[Tier], notice: float) -> Plan:
    """The tiers that fit, and those of which nobody knows; a source stands before what is copied from it.

    Where all are too slow, the quickest that needs no other is tried: late may still be in time.
    """
    budget = SHARE * max(0.0, notice)
    ends: dict[str, float] = {}
    taken: list[str] = []
    for tier in tiers:
        begin = ends.get(tier.source) if tier.source else 0.0
        if begin is not None and tier.seconds is not None:
            ends[tier.name] = begin + tier.seconds
        if ends.get(tier.name, 0.0) <= budget and (not tier.source or tier.source in taken):
            taken.append(tier.name)
    told = "; ".join(f"{tier.name}: {_told(ends.get(tier.name))}" for tier in tiers) or "there is no tier"
    reason = f"of {max(0.0, notice):.1f} s, {budget:.1f} s are counted on ({told})"
    if taken:
        return Plan(tiers=tuple(taken), reason=reason, certain=any(name in ends for name in taken))
    roots = sorted((tier for tier in tiers if not tier.source), key=lambda tier: ends[tier.name])
    return Plan(tiers=tuple(tier.name for tier in roots[:1]), reason=reason, certain=False)


def _told(end: float | None) -> str:
    return "not measured" if end is None else f"done in {end:.1f} s"


@dataclass
class Speed:
    """What the last commits to a tier took."""

    taken: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def took(self, nbytes: int, seconds: float) -> None:
        """One more. What took no time says nothing."""
        if nbytes > 0 and seconds > 0:
            self.taken.append((nbytes, seconds))

    def tier(self, name: str, source: str = "") -> Tier:
        """The largest of them at their median speed: after deltas a full one may be due."""
        rate = statistics.median(nbytes / seconds for nbytes, seconds in self.taken) if self.taken else None
        most = max((nbytes for nbytes, _ in self.taken), default=0)
        return Tier(name=name, nbytes=most, bytes_per_second=rate, source=source)
