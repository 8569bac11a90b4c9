"""The shards of a sharded model that a launcher's ranks have in memory, as launchers report them to each other. Pure.

The report only affects which members a new world prefers if not all fit (`rules.largest_world`). The ranks themselves
decide which state to continue from (`shards.resolve`). A late or wrong report may cost steps, but never correctness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.attempt import AttemptId
from holdfast.core.json_fields import JsonFields


@dataclass(frozen=True, kw_only=True)
class HeldShards(JsonFields):
    """Shards of a model with `count` shards. The ranks received this state in attempt `attempt_id`."""

    attempt_id: AttemptId
    count: int
    shards: frozenset[int]


def joined(parts: Iterable[HeldShards]) -> HeldShards | None:
    """Return the shards of the newest state that all ranks of a launcher hold; None if the model is not sharded."""
    parts = list(parts)
    newest = max((part.attempt_id for part in parts), default=None)
    if newest is None:
        return None
    same = [part for part in parts if part.attempt_id == newest]
    return HeldShards(
        attempt_id=newest, count=same[0].count, shards=frozenset[int]().union(*(part.shards for part in same))
    )


def left_out(order: Sequence[str], capacity: int, held: Mapping[str, HeldShards]) -> frozenset[str] | None:
    """Return the members outside a world of size `capacity`: the last ones whose shards of the newest state others
    hold too.

    None if all members together lack a shard, or if no such world was found.
    """
    newest = max((one.attempt_id for one in held.values()), default=None)
    have = {uid: one.shards for uid in order if (one := held.get(uid)) is not None and one.attempt_id == newest}
    holders = Counter(shard for shards in have.values() for shard in shards)
    if not holders or len(holders) < max(one.count for one in held.values() if one.attempt_id == newest):
        return None
    out: set[str] = set()
    for uid in reversed(order):
        shards = have.get(uid, frozenset())
        if len(order) - len(out) > capacity and all(holders[shard] > 1 for shard in shards):
            holders.subtract(shards)
            out.add(uid)
    return frozenset(out) if len(order) - len(out) == capacity else None
