"""Find the workers at fault for failed connections.

Invariant: each failed pair that includes a worker of ``order`` includes one at fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

PeerPair = tuple[str, str]


def to_blame(pairs: Iterable[PeerPair], order: Sequence[str]) -> frozenset[str]:
    """Select the worker in most failed pairs repeatedly; of equals, the first in ``order``. Skip all others."""
    left = set(pairs)
    blamed: set[str] = set()
    place = {uid: number for number, uid in enumerate(order)}
    while True:
        counts = Counter(uid for pair in left for uid in set(pair) if uid in place)
        if not counts:
            return frozenset(blamed)
        worst = min(counts, key=lambda uid: (-counts[uid], place[uid]))
        blamed.add(worst)
        left = {pair for pair in left if worst not in pair}
