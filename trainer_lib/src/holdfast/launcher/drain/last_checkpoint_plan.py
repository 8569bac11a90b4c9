"""What a worker that must leave can still commit where. Pure: speeds were measured, the notice is an argument.

A notice is a promise of others, and a disk or a network that everybody presses at once is slower than it was. So only
what is predicted to be done within 60 % of the notice is counted on. Tiers are filled one after the other, and of
those whose speed is known the quickest are taken first: what is safe early stays safe when a later one fails.

Invariant: what is counted on is done within the share, with all that is made before it, and does not lie on a node
that goes. The memory of such a node is worth no more than the copy of it that another node gets.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.core.errors import UsageError

SHARE: Final = 0.6
_REMEMBERED: Final = 5


@dataclass(frozen=True, kw_only=True)
class TierEstimate:
    """Where commits go: how many bytes, and how fast it took them. One with a `source` begins when that has them.

    A speed of None was never measured. `node` is the one on which the bytes lie, if they lie on one. What is `due` is
    made at the last step whatever is planned.
    """

    name: str
    nbytes: int
    bytes_per_second: float | None
    source: str = ""
    node: str | None = None
    due: bool = False

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
    """Whether at least one of them is predicted to be done in time, and to be there afterwards."""


def plan(
    tiers: Sequence[TierEstimate], notice: float, *, wait: float = 0.0, going: Collection[str | None] = frozenset()
) -> Plan:
    """The tiers that fit, and those of which nobody knows and that delay none that is known; they are filled in the
    order in which they are given, after the step that takes `wait` seconds. What lies on a node that is `going` is
    not worth its time, but as the source of another.

    Where all are too slow, those of unknown speed are tried, or else the quickest: late may still be in time.
    """
    case = _Case(tiers={tier.name: tier for tier in tiers}, budget=SHARE * max(0.0, notice), wait=wait, going=going)
    taken = _fitting(case)
    if any(map(case.worth, taken)):
        taken = taken | _behind(case, taken)
    else:
        taken = taken | (_unknown(case, taken) or _quickest(case, taken))
    ends = _ends(case, taken)
    counted = [name for name in taken if case.worth(name) and case.in_time(ends[name])]
    return Plan(
        tiers=tuple(name for name in case.tiers if name in taken),
        reason=_reason(case, max(0.0, notice), ends),
        certain=bool(counted),
    )


@dataclass(frozen=True, kw_only=True)
class _Case:
    """What there is to choose from, by name and in the order in which tiers are filled."""

    tiers: Mapping[str, TierEstimate]
    budget: float
    wait: float
    going: Collection[str | None]

    def worth(self, name: str) -> bool:
        """Whether what lies there is still there when those who go have gone."""
        node = self.tiers[name].node
        return node is None or node not in self.going

    def in_time(self, end: float | None) -> bool:
        """Whether that can be counted on."""
        return end is not None and end <= self.budget

    def chains(self, taken: Collection[str]) -> Iterator[tuple[str, ...]]:
        """What could be taken besides: each tier that is worth it, behind the sources that it lacks."""
        for name in self.tiers:
            if name not in taken and self.worth(name):
                chain = self.chain(name, taken)
                if chain:
                    yield chain

    def chain(self, name: str, taken: Collection[str]) -> tuple[str, ...]:
        """Nothing if a source is none that there is."""
        chain: tuple[str, ...] = ()
        while name and name not in taken:
            if name not in self.tiers:
                return ()
            chain, name = (name, *chain), self.tiers[name].source
        return chain

    def cost(self, names: Collection[str]) -> float | None:
        """How long they take one after the other; None if that is not known of all."""
        total = 0.0
        for name in names:
            seconds = self.tiers[name].seconds
            if seconds is None:
                return None
            total += seconds
        return total


def _fitting(case: _Case) -> frozenset[str]:
    """What is due, and the quickest of the others for as long as they fit. The order in which they are looked at does
    not depend on the notice, so a longer one takes none away."""
    taken = [name for name, tier in case.tiers.items() if tier.due]
    spent = case.wait + sum(case.tiers[name].seconds or 0.0 for name in taken)
    while True:
        known = [(cost, chain) for chain in case.chains(taken) if (cost := case.cost(chain)) is not None]
        if not known:
            return frozenset(taken)
        cost, chain = min(known, key=lambda one: one[0])
        spent += cost
        if spent > case.budget:
            return frozenset(taken)
        taken += chain


def _behind(case: _Case, taken: frozenset[str]) -> frozenset[str]:
    """Those of which nobody knows how long they take, if none that is known has to wait for them."""
    order = list(case.tiers)
    known = [order.index(name) for name, tier in case.tiers.items() if case.worth(name) and tier.seconds is not None]
    last = max(known, default=-1)
    chains = [chain for chain in case.chains(taken) if all(order.index(name) > last for name in chain)]
    return frozenset(name for chain in chains for name in chain)


def _unknown(case: _Case, taken: frozenset[str]) -> frozenset[str]:
    """Those of which nobody knows, if what is known of their sources is in time."""
    found: set[str] = set()
    for chain in case.chains(taken):
        known = sum(case.tiers[name].seconds or 0.0 for name in chain)
        if case.cost(chain) is None and case.wait + known <= case.budget:
            found |= set(chain)
    return frozenset(found)


def _quickest(case: _Case, taken: frozenset[str]) -> frozenset[str]:
    def seconds(chain: tuple[str, ...]) -> float:
        cost = case.cost(chain)
        return math.inf if cost is None else cost

    chains = sorted(case.chains(taken), key=seconds)
    return frozenset(chains[0] if chains else ())


def _ends(case: _Case, taken: Collection[str]) -> dict[str, float | None]:
    """When each is done; of one that is not taken, when it would be in its place."""
    ends: dict[str, float | None] = {}
    at: float | None = case.wait
    for name, tier in case.tiers.items():
        if name in taken:
            at = ends[name] = _plus(at, tier.seconds)
        else:
            ends[name] = _plus(case.wait if at is None else at, case.cost(case.chain(name, taken) or (name,)))
    return ends


def _plus(at: float | None, seconds: float | None) -> float | None:
    return None if at is None or seconds is None else at + seconds


def _reason(case: _Case, notice: float, ends: Mapping[str, float | None]) -> str:
    told = "; ".join(f"{name}: {_told(case, name, end)}" for name, end in ends.items()) or "there is no tier"
    step = f", the first {case.wait:.1f} s for the step that is being made" if round(case.wait, 1) else ""
    return f"of {notice:.1f} s, {case.budget:.1f} s are counted on{step} ({told})"


def _told(case: _Case, name: str, end: float | None) -> str:
    done = "not measured" if end is None else f"done in {end:.1f} s"
    return done if case.worth(name) else f"{done}, and gone with {case.tiers[name].node}"


@dataclass
class Speed:
    """What the last commits to a tier took."""

    taken: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def took(self, nbytes: int, seconds: float) -> None:
        """One more. What took no time says nothing."""
        if nbytes > 0 and seconds > 0:
            self.taken.append((nbytes, seconds))

    def tier(self, name: str, source: str = "", *, node: str | None = None, due: bool = False) -> TierEstimate:
        """The largest of them at their median speed: after deltas a full one may be due."""
        rate = statistics.median(nbytes / seconds for nbytes, seconds in self.taken) if self.taken else None
        most = max((nbytes for nbytes, _ in self.taken), default=0)
        return TierEstimate(name=name, nbytes=most, bytes_per_second=rate, source=source, node=node, due=due)
