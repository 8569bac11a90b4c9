"""Which shards of a sharded model the ranks of a launcher have in memory, as launchers tell each other. Pure.

Only a preference follows from it: whom a new world takes in where not all fit (`rules.largest_world`). Whose
state goes on is decided by the ranks themselves (`shards.resolve`): a word that is late or wrong may cost
steps, never truth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.attempt import AttemptId
from holdfast.core.json_fields import JsonFields


@dataclass(frozen=True, kw_only=True)
class HeldShards(JsonFields):
    """Shards of a model of `count`, in the state of which the ranks were put in place in attempt `pair`."""

    pair: AttemptId
    count: int
    shards: frozenset[int]


def together(parts: Iterable[HeldShards]) -> HeldShards | None:
    """What all ranks of a launcher hold of the newest state of theirs; None if the model is not sharded."""
    parts = list(parts)
    newest = max((part.pair for part in parts), default=None)
    if newest is None:
        return None
    same = [part for part in parts if part.pair == newest]
    return HeldShards(
        pair=newest, count=same[0].count, shards=frozenset[int]().union(*(part.shards for part in same))
    )


def left_out(order: Sequence[str], room: int, held: Mapping[str, HeldShards]) -> frozenset[str] | None:
    """Who of these stays outside a world of `room`: the last ones without whom each shard of the newest is there.

    None if even all of them together lack one, or if no such world was found.
    """
    newest = max((one.pair for one in held.values()), default=None)
    have = {uid: one.shards for uid in order if (one := held.get(uid)) is not None and one.pair == newest}
    holders = Counter(shard for shards in have.values() for shard in shards)
    if not holders or len(holders) < max(one.count for one in held.values() if one.pair == newest):
        return None
    out: set[str] = set()
    for uid in reversed(order):
        shards = have.get(uid, frozenset())
        if len(order) - len(out) > room and all(holders[shard] > 1 for shard in shards):
            holders.subtract(shards)
            out.add(uid)
    return frozenset(out) if len(order) - len(out) == room else None
