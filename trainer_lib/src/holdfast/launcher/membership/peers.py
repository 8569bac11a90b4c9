"""The state of the peers' channels, and the effects of their messages."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.attempt import AttemptId, highest
from holdfast.core.protocol import Cause
from holdfast.launcher.membership import events, messages
from holdfast.launcher.membership.attempt_end import (
    budgets,
    completion,
    drain,
    failures,
    foreign_claims,
    incidents,
    root_cause,
)
from holdfast.launcher.membership.document import Member
from holdfast.launcher.membership.events import How, KeepStacks
from holdfast.launcher.membership.formation import acceptance, proposal_answers
from holdfast.launcher.membership.membership_update import conflicts, update_membership
from holdfast.launcher.membership.messages import Failure, Hello, Priority, ShareMembership
from holdfast.launcher.membership.state import Peer
from holdfast.launcher.membership.transition import Transition, lost


def peer_up(turn: Transition, event: events.PeerUp) -> None:
    """A channel opened: send the newest `Hello` to the peer."""
    turn.set_peer(event.pod_uid, Peer(up=True, since=turn.now, met=True))
    if turn.state.hello is not None:
        turn.send(event.pod_uid, turn.state.hello)


def peer_down(turn: Transition, event: events.PeerDown) -> None:
    """A channel is lost. If the peer is a member of the attempt and does not drain, the attempt fails."""
    known = turn.state.peers.get(event.pod_uid, Peer(up=False, since=turn.now))
    if known.how is not None and not known.up:
        return
    turn.set_peer(event.pod_uid, replace(known, up=False, since=turn.now, how=event.how))
    _member_lost(turn, event.pod_uid, event.how)


def _member_lost(turn: Transition, uid: str, how: How) -> None:
    attempt = turn.attempt
    member = next((m for m in attempt.world.members if m.pod_uid == uid), None) if attempt else None
    if attempt is None or member is None:
        return
    said = turn.state.peers[uid].hello
    if said is not None and said.draining:
        turn.set_attempt(quiesced_at=attempt.quiesced_at or turn.now)
    else:
        turn.fail(lost(member, how, turn.now))


def received(turn: Transition, event: events.Received) -> None:
    """Process a message of a live peer."""
    if not turn.up(event.sender):
        return
    message = event.message
    match message:
        case Hello():
            _hello(turn, event.sender, message)
        case ShareMembership():
            update_membership(turn, message.membership)
        case messages.Propose():
            acceptance.consider(turn, event.sender, message)
        case messages.Accept():
            proposal_answers.accepted_by(turn, event.sender, message.world)
        case messages.Refuse():
            proposal_answers.refused_by(turn, event.sender, message)
        case messages.Start():
            proposal_answers.enter(turn, message)
        case _:
            _on_end_message(turn, event.sender, message)


def _on_end_message(turn: Transition, sender: str, message: messages.Message) -> None:
    match message:
        case messages.Confirm():
            completion.confirm(turn, sender, message.attempt_id)
        case messages.Confirmed():
            completion.confirmed_by(turn, sender, message.attempt_id)
        case messages.Complete():
            completion.completed(turn, message.attempt_id)
        case messages.GiveUp():
            budgets.give_up(turn, message.incident, message.message)
        case messages.Hang():
            _on_remote_hang(turn, sender, message)
        case messages.Leaving():
            completion.left(turn, sender, message.code)
            _member_lost(turn, sender, How.LEFT)


def _on_remote_hang(turn: Transition, sender: str, hang: messages.Hang) -> None:
    attempt = turn.attempt
    if attempt is not None and attempt.world.attempt_id == hang.attempt_id and sender in attempt.world.uids:
        turn.do(KeepStacks(attempt_id=hang.attempt_id, message=hang.message))


def _hello(turn: Transition, sender: str, hello: Hello) -> None:
    peer = turn.state.peers[sender]
    answered = hello.accepted is not None and hello.accepted == turn.state.accepted
    muted_until = 0.0 if answered else peer.muted_until
    turn.set_peer(sender, replace(peer, hello=hello, muted_until=muted_until))
    turn.set(started=highest(turn.state.started, hello.started))
    _share(turn, sender, hello)
    if hello.foreign:
        foreign_claims.stop_for(turn, hello.foreign)
    drain.join_drain(turn, sender, hello)
    _compare(turn, sender, hello)


def _share(turn: Transition, sender: str, hello: Hello) -> None:
    """Send the newest membership to a peer with an older one, so that one sidecar with a connection is enough."""
    membership, peer = turn.membership, turn.state.peers[sender]
    if membership is None:
        return
    if conflicts(membership, hello.generation, hello.publication):
        turn.set(conflict=membership.generation)
    elif (hello.generation, hello.revision) < membership.newness and turn.now >= peer.shared_at + turn.rules.resend:
        turn.set_peer(sender, replace(peer, shared_at=turn.now))
        turn.send(sender, ShareMembership(membership=membership))


def _compare(turn: Transition, sender: str, hello: Hello) -> None:
    """Process what a member reports about this attempt: it failed there, or was left for a higher one."""
    attempt = turn.attempt
    if hello.failed is not None and hello.failure is not None and not hello.draining:
        incidents.revise_incident(turn, hello.failed, hello.failure)
    if attempt is None or sender not in attempt.world.uids:
        return
    attempt_id = attempt.world.attempt_id
    if hello.failed == attempt_id and hello.failure is not None and not hello.draining:
        turn.fail(hello.failure)
    elif hello.left is not None and hello.left >= attempt_id and (hello.draining or root_cause.drains(turn, attempt)):
        # Other launchers may learn first that the agreed checkpoint is durable, and leave before the local ranks
        # report it.
        turn.set_attempt(quiesced_at=attempt.quiesced_at or turn.now)
    elif (highest(hello.accepted, _next(hello.left)) or attempt_id) > attempt_id and turn.state.pending is None:
        turn.fail(_moved_on(attempt.world.members, sender))


def _next(attempt_id: AttemptId | None) -> AttemptId | None:
    return None if attempt_id is None else AttemptId(attempt_id.generation, attempt_id.attempt + 1)


def _moved_on(members: tuple[Member, ...], sender: str) -> Failure:
    member = next(m for m in members if m.pod_uid == sender)
    return Failure(
        cause=Cause.INFRASTRUCTURE,
        reason=failures.MOVED_ON,
        message=f"{member.pod or sender} is no longer in this attempt",
        priority=Priority.PEER_LOST,
        pod=member.pod,
        node=member.node,
    )
