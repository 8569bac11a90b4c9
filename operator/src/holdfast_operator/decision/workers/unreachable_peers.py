"""Who is to blame where workers do not reach each other.

Invariant: each pair of which one may be blamed has one that is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

PeerPair = tuple[str, str]


def to_blame(pairs: Iterable[PeerPair], order: Sequence[str]) -> frozenset[str]:
    """Again and again the one in most pairs; of equals the first in ``order``. Who is not in it is never blamed."""
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
