"""Determines why an attempt ended: the root of its failures, or the drain of a member."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.attempt import AttemptId
from holdfast.core.protocol import Cause
from holdfast.launcher.membership.document import Member
from holdfast.launcher.membership.messages import Failure, Priority, World
from holdfast.launcher.membership.state import Attempt, Drain
from holdfast.launcher.membership.transition import DRAINED, Transition


def root_cause(turn: Transition, attempt: Attempt) -> Failure:
    """Return the failure with the lowest priority number, and of those the earliest one.

    A drain of a member, or a rank that ended early, explains a lost peer and replaces it.
    """
    root = min(attempt.failures, key=lambda failure: failure.rank_of_root)
    drained = drain_failure(turn, attempt)
    if root.priority is Priority.PEER_LOST and drained is not None:
        root = drained
    elif root.priority is Priority.PEER_LOST and _someone_done(turn, attempt):
        root = replace(
            root,
            cause=Cause.APPLICATION,
            reason="EndedEarly",
            message=f"a rank ended normally while others still had steps to do ({root.message})",
        )
    steps = [step for step in (root.step, attempt.step) if step is not None]
    return replace(root, step=max(steps, default=None))


def _someone_done(turn: Transition, attempt: Attempt) -> bool:
    attempt_id = attempt.world.attempt_id
    said = [hello for uid in attempt.world.uids if (hello := turn.hello(uid))]
    return attempt.done or any(hello.done and hello.world and hello.world.attempt_id == attempt_id for hello in said)


def drain_failure(turn: Transition, attempt: Attempt) -> Failure | None:
    """Return the drain of this launcher or of a member that ends this attempt; None if the drain is no incident."""
    own = drain_incident(turn)
    if own is not None:
        return own[1]
    for uid in sorted(attempt.world.uids):
        peer = turn.state.peers.get(uid)
        said = peer.hello if peer else None
        if said and said.draining and said.failed == attempt.world.attempt_id:
            return said.failure
    return None


def drain_incident(turn: Transition) -> tuple[AttemptId, Failure] | None:
    """Return attempt ID and failure that a draining launcher reports; None if the operator requested the drain."""
    drain, attempt = turn.state.drain, turn.attempt
    if drain is None or drain.cause is None or attempt is None:
        return None
    leaving = _leaving(attempt.world, attempt.world.member(turn.state.me), drain)
    names = ", ".join(member.pod or member.pod_uid for member in leaving)
    return attempt.world.attempt_id, Failure(
        cause=drain.cause,
        reason=DRAINED,
        message=f"{names} {'leaves' if len(leaving) == 1 else 'leave'}: {drain.reason}",
        priority=Priority.MEMBER_LOST,
        pod=leaving[0].pod,
        node=leaving[0].node,
    )


def _leaving(world: World, me: Member, drain: Drain) -> tuple[Member, ...]:
    """Return the members that leave by this drain. All of them return the same members, in the same order."""
    return tuple(member for member in world.members if drain.node and member.node == drain.node) or (me,)


def sent_away(turn: Transition, world: World) -> bool:
    """Whether a member leaves because the operator requested it.

    Its ranks end at different times. This is no incident for members that have not received their own drain yet.
    """
    said = [peer.hello for uid in world.uids if (peer := turn.state.peers.get(uid)) and peer.hello]
    return any(hello.draining and not hello.ready and hello.failed != world.attempt_id for hello in said)


def drains(turn: Transition, attempt: Attempt) -> bool:
    """Whether any member is leaving this attempt."""
    said = [peer.hello for uid in attempt.world.uids if (peer := turn.state.peers.get(uid))]
    return turn.state.drain is not None or any(hello is not None and hello.draining for hello in said)
