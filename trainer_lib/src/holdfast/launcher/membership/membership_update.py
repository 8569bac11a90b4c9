"""Processes a newer membership and the requests in it. Rule 1."""

from __future__ import annotations

from holdfast.launcher.membership import events
from holdfast.launcher.membership.attempt_end import drain, foreign_claims
from holdfast.launcher.membership.document import Membership
from holdfast.launcher.membership.events import RequestCheckpoint
from holdfast.launcher.membership.transition import Transition


def update_membership(turn: Transition, membership: Membership) -> None:
    """Rule 1: a new generation only changes which worlds may be proposed and accepted."""
    known = turn.membership
    if known is not None and conflicts(known, membership.generation, membership.publication):
        turn.set(conflict=known.generation)
        return
    if known is not None and membership.newness <= known.newness:
        return
    new = known is None or membership.generation > known.generation
    open_ones = tuple(i for i in turn.state.incidents if i.attempt_id not in membership.acknowledged)
    turn.set(membership=membership, incidents=open_ones, seen_at=turn.now if new else turn.state.seen_at)
    foreign_claims.stop_for(turn, ())
    if membership.checkpoint is not None:
        request_checkpoint(turn, membership.checkpoint.id, membership.checkpoint.reason)
    if turn.state.me in membership.drain:
        reason = f"the operator requested it in revision {membership.revision}"
        drain.begin_drain(turn, events.DrainRequested(id=f"drain-{membership.revision}", reason=reason, cause=None))


def conflicts(known: Membership, generation: int, publication: str) -> bool:
    """Whether a generation was published twice."""
    return known.generation == generation and known.publication != publication


def request_checkpoint(turn: Transition, id_: str, reason: str) -> None:
    """Pass a request on once. Before the first step of an attempt, the request waits for that step."""
    state = turn.state
    if id_ in state.requests:
        return
    turn.set(requests=state.requests | {id_})
    attempt = turn.attempt
    if attempt is not None and attempt.step is not None and not attempt.done:
        turn.do(RequestCheckpoint(attempt_id=attempt.world.attempt_id, id=id_, reason=reason))
    else:
        turn.set(waiting_requests=(*state.waiting_requests, (id_, reason)))
