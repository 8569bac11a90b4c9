"""Decides which workers may train: rules (a), (b) and (c) of `docs/reference/protocol.md`. Pure functions.

Invariant: of two worlds whose completed steps could both be read later, at most one starts. By rule (b), two worlds
of one generation share a member, which leaves the lower world when it accepts the higher one. By rule (c), no earlier
generation since the last active one has enough remaining members to form a world of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holdfast.core.attempt import AttemptId
from holdfast.launcher.membership.document import Member, Membership, Rules
from holdfast.launcher.membership.held_shards import HeldShards, left_out


@dataclass(frozen=True, kw_only=True)
class WeakenedQuorum:
    """Rules to disable, for tests that show that each rule is necessary. Production disables none."""

    majority: bool = False
    older_generations: bool = False


NOTHING = WeakenedQuorum()


@dataclass(frozen=True)
class QuorumDecision:
    """Whether a world is permitted, and why not. `fence`: the pods that must first be proved gone."""

    ok: bool
    reason: str = ""
    fence: frozenset[str] = frozenset()


OK = QuorumDecision(True)


def may_be(
    membership: Membership, world: frozenset[str], started: AttemptId | None, weakened: WeakenedQuorum = NOTHING
) -> QuorumDecision:
    """Apply rules (b) and (c) to a world of this generation. `started` is the highest known started attempt."""
    size = right_size(membership, world, weakened)
    if not size.ok:
        return size
    return OK if weakened.older_generations else no_older_world(membership, world, started)


def right_size(membership: Membership, world: frozenset[str], weakened: WeakenedQuorum = NOTHING) -> QuorumDecision:
    """Rule (b): a strict majority, at least `minReplicas`, a multiple of `replicaStep`, all if it may not shrink."""
    rules, members = membership.rules, membership.uids
    if not world <= members:
        return QuorumDecision(False, f"{_names(world - members)} not in generation {membership.generation}")
    if 2 * len(world) <= len(members) and not weakened.majority:
        return QuorumDecision(
            False, f"{len(world)} of {len(members)} workers are not a majority of generation {membership.generation}"
        )
    if len(world) < rules.min_replicas:
        return QuorumDecision(False, f"{len(world)} workers are fewer than minReplicas {rules.min_replicas}")
    if len(world) % rules.replica_step:
        return QuorumDecision(False, f"{len(world)} workers are not a multiple of replicaStep {rules.replica_step}")
    if world != members and not rules.may_shrink:
        return QuorumDecision(False, f"{_names(members - world)} missing, and the job may not shrink")
    return OK


def no_older_world(membership: Membership, world: frozenset[str], started: AttemptId | None) -> QuorumDecision:
    """Rule (c): of each generation since the last active one, at most half is neither here nor proved gone."""
    gap = missing_generation(membership, started)
    if gap is not None:
        return QuorumDecision(False, f"the membership does not list generation {gap}, which may still hold a world")
    first = first_to_fence(membership, started)
    for previous in membership.previous:
        left = previous.members - world - membership.gone
        if previous.generation >= first and 2 * len(left) > len(previous.members):
            return QuorumDecision(
                False,
                f"{_names(left)} of generation {previous.generation} may still train; training resumes when they"
                " report, or are confirmed gone (delete the Node object, or taint it with"
                " node.kubernetes.io/out-of-service:NoExecute, once the machine is off)",
                frozenset(left),
            )
    return OK


def first_to_fence(membership: Membership, started: AttemptId | None) -> int:
    """Return the earliest generation that may still hold a world."""
    known = [attempt_id.generation for attempt_id in (membership.active, started) if attempt_id is not None]
    return max(known, default=1)


def missing_generation(membership: Membership, started: AttemptId | None) -> int | None:
    """Return the first generation that `previous` should list and does not; None if it is complete."""
    needed = first_to_fence(membership, started)
    for entry in sorted(membership.previous, key=lambda entry: entry.generation):
        last = entry.generation if entry.through is None else entry.through
        if entry.generation <= needed <= last:
            needed = last + 1
    return needed if needed < membership.generation else None


def largest_world(
    rules: Rules, candidates: Iterable[Member], held: Mapping[str, HeldShards] | None = None
) -> tuple[Member, ...]:
    """Return as many candidates as `replicaStep` permits, the lowest indexes first.

    For a sharded model, the world includes every shard that the candidates hold, if that is possible.
    """
    ordered = sorted(candidates)
    capacity = len(ordered) - len(ordered) % rules.replica_step
    out = left_out([member.pod_uid for member in ordered], capacity, held) if held else None
    if not capacity or out is None:
        return tuple(ordered[:capacity])
    return tuple(member for member in ordered if member.pod_uid not in out)


def _names(uids: Iterable[str]) -> str:
    return ", ".join(sorted(uids)) or "nobody"
