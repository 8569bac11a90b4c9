"""Plans which tiers a worker that must leave can still write to. Pure: speeds and notice are parameters.

The notice may be shorter than promised, and a disk or network slows down when many workers use it at once. The plan
therefore relies only on writes that are predicted to finish within 60 % of the notice. Tiers are filled one after the
other. Of the tiers with known speed, the fastest ones are selected first: a finished tier stays safe if a later one
fails.

Invariant: each tier that the plan relies on finishes within this share, after all tiers before it. It does not lie on
a node that goes away. Memory of such a node is useful only as the source of a copy on another node.
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
    """The predicted size and speed of a tier. A tier with a `source` begins when the source is complete.

    A speed of None was never measured. `node` is the node that holds the bytes, if a single node does. A tier that is
    `due` is written at the last step in any case.
    """

    name: str
    nbytes: int
    bytes_per_second: float | None
    source: str = ""
    node: str | None = None
    due: bool = False

    def __post_init__(self) -> None:
        if self.nbytes < 0 or (self.bytes_per_second is not None and self.bytes_per_second <= 0):
            size, pace = self.nbytes, self.bytes_per_second
            raise UsageError(f"tier {self.name}: {size} bytes at {pace} bytes/s: expected positive numbers")

    @property
    def seconds(self) -> float | None:
        """Seconds that this tier takes by itself; None if its speed is unknown."""
        return None if self.bytes_per_second is None else self.nbytes / self.bytes_per_second


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The selected tiers in their order, and the reason."""

    tiers: tuple[str, ...]
    reason: str
    certain: bool
    """Whether at least one tier is predicted to finish in time and to remain after the nodes are gone."""


def plan(
    tiers: Sequence[TierEstimate], notice: float, *, wait: float = 0.0, leaving: Collection[str | None] = frozenset()
) -> Plan:
    """Return the tiers that fit into the notice (seconds).

    Tiers of unknown speed are included if they do not delay a tier of known speed. Tiers are filled in the given
    order, after the current step, which takes `wait` seconds. A tier on a node in `leaving` is useful only as the
    source of another one.

    If all known tiers are too slow, the plan includes those of unknown speed, or else the fastest one: it may still
    finish in time.
    """
    case = _Case(
        tiers={tier.name: tier for tier in tiers}, budget=SHARE * max(0.0, notice), wait=wait, leaving=leaving
    )
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
    """The candidate tiers by name, in the order in which tiers are filled."""

    tiers: Mapping[str, TierEstimate]
    budget: float
    wait: float
    leaving: Collection[str | None]

    def worth(self, name: str) -> bool:
        """Whether the bytes of a tier remain after the leaving nodes are gone."""
        node = self.tiers[name].node
        return node is None or node not in self.leaving

    def in_time(self, end: float | None) -> bool:
        """Whether an end at this time is within the budget."""
        return end is not None and end <= self.budget

    def chains(self, taken: Collection[str]) -> Iterator[tuple[str, ...]]:
        """Yield each further useful tier, preceded by the sources that are not taken yet."""
        for name in self.tiers:
            if name not in taken and self.worth(name):
                chain = self.chain(name, taken)
                if chain:
                    yield chain

    def chain(self, name: str, taken: Collection[str]) -> tuple[str, ...]:
        """Return a tier and its missing sources; () if a source does not exist."""
        chain: tuple[str, ...] = ()
        while name and name not in taken:
            if name not in self.tiers:
                return ()
            chain, name = (name, *chain), self.tiers[name].source
        return chain

    def cost(self, names: Collection[str]) -> float | None:
        """Return the seconds that the tiers take one after the other; None if a speed is unknown."""
        total = 0.0
        for name in names:
            seconds = self.tiers[name].seconds
            if seconds is None:
                return None
            total += seconds
        return total


def _fitting(case: _Case) -> frozenset[str]:
    """Return the due tiers, and the fastest of the others while they fit.

    The order of the candidates does not depend on the notice, so a longer notice never removes a tier.
    """
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
    """Return the tiers of unknown speed that delay no tier of known speed."""
    order = list(case.tiers)
    known = [order.index(name) for name, tier in case.tiers.items() if case.worth(name) and tier.seconds is not None]
    last = max(known, default=-1)
    chains = [chain for chain in case.chains(taken) if all(order.index(name) > last for name in chain)]
    return frozenset(name for chain in chains for name in chain)


def _unknown(case: _Case, taken: frozenset[str]) -> frozenset[str]:
    """Return the tiers of unknown speed whose known sources finish in time."""
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
    """Return the end of each tier; for a tier that is not taken, its end if it were taken."""
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
    texts = "; ".join(f"{name}: {_tier_text(case, name, end)}" for name, end in ends.items()) or "there is no tier"
    step = f", including {case.wait:.1f} s for the step in progress" if round(case.wait, 1) else ""
    return f"{case.budget:.1f} s of the notice of {notice:.1f} s are usable{step} ({texts})"


def _tier_text(case: _Case, name: str, end: float | None) -> str:
    done = "not measured" if end is None else f"done in {end:.1f} s"
    return done if case.worth(name) else f"{done}, and lost with node {case.tiers[name].node}"


@dataclass
class Speed:
    """The measured size and duration of the last checkpoints on a tier."""

    taken: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def took(self, nbytes: int, seconds: float) -> None:
        """Add a measurement. A duration of 0 is ignored."""
        if nbytes > 0 and seconds > 0:
            self.taken.append((nbytes, seconds))

    def tier(self, name: str, source: str = "", *, node: str | None = None, due: bool = False) -> TierEstimate:
        """Return an estimate with the largest size and the median speed: a full checkpoint may follow increments."""
        rate = statistics.median(nbytes / seconds for nbytes, seconds in self.taken) if self.taken else None
        most = max((nbytes for nbytes, _ in self.taken), default=0)
        return TierEstimate(name=name, nbytes=most, bytes_per_second=rate, source=source, node=node, due=due)
