"""The assignment of shards to ranks, and its effect on whose state to continue from. Pure.

A world of w ranks has w / n **shard groups** of n ranks. Each shard group is one replica of the model, and each of
its ranks holds one of n **shards**: its rows of every parameter and of the optimizer's state. Ranks with the same
shard are **peers**, and hold the same bits. The shard belongs to a rank's state and not to its number. When the world
changes, each rank keeps its shard if the new world needs it. Survivors of several incomplete shard groups can form a
new one.
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
        """Return the ranks with the same shard, in order."""
        return tuple(other for other, shard in enumerate(self.shards) if shard == self.shards[rank])

    def shard_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of this rank's shard group, in order of shards."""
        number = self.replica(rank)
        firsts = (self.shards.index(shard) for shard in range(self.size))
        return tuple(self.peers(first)[number] for first in firsts)

    def replica(self, rank: int) -> int:
        """Return the number of this rank's replica, which is its place among its peers."""
        return self.peers(rank).index(rank)


def check_world(world_size: int, size: int) -> None:
    """Raise `UsageError` if the world size is not a multiple of the replica size."""
    if world_size % size:
        raise UsageError(
            f"a world of {world_size} ranks cannot be divided into replicas of {size}: set a multiple of {size} "
            "with --nproc-per-node (or processesPerWorker), or set --replica-step (or elasticity.replicaStep)"
        )


def assign(held: Sequence[int | None], size: int) -> ShardAssignment:
    """Assign a shard to every rank. A rank keeps its shard, unless lower ranks have taken all its places."""
    check_world(len(held), size)
    free = [len(held) // size] * size
    assigned: list[int | None] = [None] * len(held)
    wishes = [held, [rank % size for rank in range(len(held))]]
    for wish in wishes:
        for rank, shard in enumerate(wish):
            if assigned[rank] is None and shard is not None and free[shard]:
                assigned[rank] = shard
                free[shard] -= 1
    left = iter([shard for shard in range(size) for _ in range(free[shard])])
    return ShardAssignment(size=size, shards=tuple(next(left) if shard is None else shard for shard in assigned))


def resolve(
    rank_states: Sequence[RankState], held: Sequence[int | None], size: int, commit: AttemptId | None = None
) -> tuple[Resolution, ShardAssignment]:
    """Decide as `step_commit.resolve`, for states that are complete only if all their shards are present.

    If a shard has more survivors than places, some of them take another shard, and count as newcomers for it.
    """
    resolution = step_commit.resolve(rank_states, commit)
    if resolution.donor is not None and _missing(resolution, held, size):
        resolution = _widened(rank_states, resolution)
    if resolution.donor is None or _missing(resolution, held, size):
        return _nobody(resolution, held, size), assign([None] * len(rank_states), size)
    assigned = assign(
        [held[rank] if rank in resolution.survivors else None for rank in range(len(rank_states))], size
    )
    stay = tuple(rank for rank in resolution.survivors if assigned.shards[rank] == held[rank])
    others = tuple(rank for rank in range(len(rank_states)) if rank not in stay)
    return replace(resolution, survivors=stay, newcomers=others, donor=stay[0]), assigned


def _missing(resolution: Resolution, held: Sequence[int | None], size: int) -> list[int]:
    have = {held[rank] for rank in resolution.survivors}
    return [shard for shard in range(size) if shard not in have]


def _widened(rank_states: Sequence[RankState], resolution: Resolution) -> Resolution:
    """Add the ranks of the same attempt that did not vote in it to the survivors.

    One such rank proves that no vote of that attempt returned on any rank. Every rank that synchronised in the
    attempt therefore has its initial state, and prepared steps are discarded.
    """
    synced = rank_states[resolution.survivors[0]].synced
    members = tuple(rank for rank, rank_state in enumerate(rank_states) if rank_state.synced == synced)
    if synced is None or len(members) == len(resolution.survivors):
        return resolution
    return replace(
        resolution,
        survivors=members,
        apply=False,
        step=rank_states[members[0]].step,
        message=f"{resolution.message}, but not with every shard: all members of {synced} continue from its start",
    )


def _nobody(resolution: Resolution, held: Sequence[int | None], size: int) -> Resolution:
    everyone = tuple(range(len(held)))
    if resolution.donor is None:
        return resolution
    gone = ", ".join(str(shard) for shard in _missing(resolution, held, size))
    return Resolution(newcomers=everyone, message=f"no rank has shard {gone} of the newest state in memory")
