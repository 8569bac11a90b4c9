"""Who holds which part of a sharded model, and what that means for whose state goes on. Pure.

A world of w ranks is w / n **replicas** of n ranks; each rank of a replica holds one of n **shards**: its rows of
every parameter and of the optimizer's state. Ranks with the same shard are **peers**, and hold the same bits; the
ranks of a replica are **mates**. Which shard a rank holds goes with its state, not with its number: when the world
changes, whoever holds a shard keeps it as far as the new world needs it, and orphans of two replicas make one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.core.attempt import AttemptId
from holdfast.core.errors import UsageError
from holdfast.training.protocol import step_commit
from holdfast.training.protocol.step_commit import RankState, Resolution


@dataclass(frozen=True, kw_only=True)
class ShardAssignment:
    """The shard of each rank of a world, in order of ranks."""

    size: int
    shards: tuple[int, ...]

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same shard, in order."""
        return tuple(other for other, shard in enumerate(self.shards) if shard == self.shards[rank])

    def mates(self, rank: int) -> tuple[int, ...]:
        """The ranks of this rank's replica, in order of shards."""
        number = self.replica(rank)
        firsts = (self.shards.index(shard) for shard in range(self.size))
        return tuple(self.peers(first)[number] for first in firsts)

    def replica(self, rank: int) -> int:
        """The number of this rank's replica: its place among its peers."""
        return self.peers(rank).index(rank)


def check_world(world_size: int, size: int) -> None:
    """UsageError if replicas of this size do not make up the world."""
    if world_size % size:
        raise UsageError(
            f"a world of {world_size} is not made of replicas of {size} ranks: give --nproc-per-node (or "
            f"processesPerWorker) a multiple of {size}, or --replica-step (or elasticity.replicaStep) one"
        )


def deal(held: Sequence[int | None], size: int) -> ShardAssignment:
    """Give every rank a shard. Who holds one keeps it, unless all its places are taken by lower ranks."""
    check_world(len(held), size)
    free = [len(held) // size] * size
    dealt: list[int | None] = [None] * len(held)
    wishes = [held, [rank % size for rank in range(len(held))]]
    for wish in wishes:
        for rank, shard in enumerate(wish):
            if dealt[rank] is None and shard is not None and free[shard]:
                dealt[rank] = shard
                free[shard] -= 1
    left = iter([shard for shard in range(size) for _ in range(free[shard])])
    return ShardAssignment(size=size, shards=tuple(next(left) if shard is None else shard for shard in dealt))


def resolve(
    standings: Sequence[RankState], held: Sequence[int | None], size: int, commit: AttemptId | None = None
) -> tuple[Resolution, ShardAssignment]:
    """As `step_commit.resolve`, for states that are complete only if every shard of them is there.

    Survivors that hold a shard of which there are enough take over another: for that they count as newcomers.
    """
    verdict = step_commit.resolve(standings, commit)
    if verdict.donor is not None and _missing(verdict, held, size):
        verdict = _widened(standings, verdict)
    if verdict.donor is None or _missing(verdict, held, size):
        return _nobody(verdict, held, size), deal([None] * len(standings), size)
    dealt = deal([held[rank] if rank in verdict.survivors else None for rank in range(len(standings))], size)
    stay = tuple(rank for rank in verdict.survivors if dealt.shards[rank] == held[rank])
    others = tuple(rank for rank in range(len(standings)) if rank not in stay)
    return replace(verdict, survivors=stay, newcomers=others, donor=stay[0]), dealt


def _missing(verdict: Resolution, held: Sequence[int | None], size: int) -> list[int]:
    have = {held[rank] for rank in verdict.survivors}
    return [shard for shard in range(size) if shard not in have]


def _widened(standings: Sequence[RankState], verdict: Resolution) -> Resolution:
    """With those of the same attempt that did not vote in it.

    One such rank proves that no vote of that attempt returned to anybody: whoever synchronised in it has the state of
    its beginning, and what is in doubt is discarded.
    """
    synced = standings[verdict.survivors[0]].synced
    members = tuple(rank for rank, standing in enumerate(standings) if standing.synced == synced)
    if synced is None or len(members) == len(verdict.survivors):
        return verdict
    return replace(
        verdict,
        survivors=members,
        apply=False,
        step=standings[members[0]].step,
        message=f"{verdict.message}, but not with every shard: all members of {synced} go on from its beginning",
    )


def _nobody(verdict: Resolution, held: Sequence[int | None], size: int) -> Resolution:
    everyone = tuple(range(len(held)))
    if verdict.donor is None:
        return verdict
    gone = ", ".join(str(shard) for shard in _missing(verdict, held, size))
    return Resolution(newcomers=everyone, message=f"no rank has shard {gone} of the newest state in memory")
