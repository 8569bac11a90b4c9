"""A proposal in progress: answers, repetitions, and the start of its world. Pure; rule 2 of the protocol."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdfast.core.attempt import highest
from holdfast.launcher.membership.document import Member
from holdfast.launcher.membership.events import StartRanks
from holdfast.launcher.membership.messages import Master, Propose, Refuse, Start, World
from holdfast.launcher.membership.state import Attempt, Proposal
from holdfast.launcher.membership.transition import Transition

MAX_REFUSALS = 3


def send_proposal(turn: Transition, uids: Iterable[str]) -> None:
    proposal = turn.state.proposal
    if proposal is not None:
        message = Propose(world=proposal.world, started=turn.started(), incident=proposal.incident)
        for uid in sorted(uids):
            turn.send(uid, message)


def pursue(turn: Transition) -> None:
    """Advance this launcher's own proposal until its world starts or the proposal is dropped."""
    proposal = turn.state.proposal
    if proposal is None:
        return
    uids = proposal.world.uids
    overtaken = turn.state.accepted is not None and turn.state.accepted > proposal.world.attempt_id
    if (
        overtaken
        or turn.state.drain is not None
        or any(turn.on_its_way_out(uid) and not turn.stays(uid) for uid in uids)
    ):
        withdraw(turn, 0.0)
    elif proposal.accepted >= uids and proposal.master is not None:
        _start(turn, proposal, proposal.master)
    elif turn.now >= proposal.until:
        for uid in uids - proposal.accepted - {turn.state.me}:
            peer = turn.state.peers[uid]
            turn.set_peer(uid, replace(peer, muted_until=turn.now + turn.rules.never_accepted_wait))
        withdraw(turn, 0.0)
    elif turn.now >= proposal.sent + turn.rules.resend:
        turn.set(proposal=replace(proposal, sent=turn.now))
        send_proposal(turn, uids - proposal.accepted)


def withdraw(turn: Transition, pause: float) -> None:
    """Drop the proposal. A higher index waits longer, so that two proposers do not block each other."""
    place = sum(1 for member in turn.usable_members() if member.pod_uid != turn.state.me and _before(turn, member))
    turn.set(proposal=None, retry_at=turn.now + pause * (1 + place))


def _before(turn: Transition, member: Member) -> bool:
    me = turn.membership.member(turn.state.me) if turn.membership else None
    return me is not None and member.index < me.index


def _start(turn: Transition, proposal: Proposal, master: Master) -> None:
    """Rule 2: all members accepted exactly this world."""
    turn.set(proposal=None)
    started = Start(world=proposal.world, master=master)
    for uid in sorted(proposal.world.uids):
        turn.send(uid, started)
    enter(turn, started)


def remind(turn: Transition) -> None:
    """Send `Start` again to members that have not reported it."""
    attempt = turn.attempt
    if attempt is None or attempt.world.coordinator != turn.state.me:
        return
    if turn.now < attempt.started_sent + turn.rules.resend:
        return
    turn.set_attempt(started_sent=turn.now)
    for uid in sorted(attempt.world.uids):
        hello = turn.hello(uid)
        if hello is not None and hello.world != attempt.world and hello.accepted == attempt.world.attempt_id:
            turn.send(uid, Start(world=attempt.world, master=attempt.master))


def accepted_by(turn: Transition, sender: str, world: World) -> None:
    """Record an acceptance of this launcher's proposal. It must repeat exactly the proposed world."""
    proposal = turn.state.proposal
    if proposal is not None and proposal.world == world and sender in world.uids:
        turn.set(proposal=replace(proposal, accepted=proposal.accepted | {sender}))
        if (peer := turn.state.peers.get(sender)) is not None:
            turn.set_peer(sender, replace(peer, refusals=0))


def refused_by(turn: Transition, sender: str, refusal: Refuse) -> None:
    """Process a refusal of this launcher's proposal: drop the proposal and retry later.

    A member that refuses repeatedly is excluded for a while.
    """
    turn.set(refused=highest(turn.state.refused, refusal.highest))
    proposal, peer = turn.state.proposal, turn.state.peers[sender]
    if proposal is None or proposal.world.attempt_id != refusal.attempt_id:
        return
    overtaken = refusal.highest is not None and refusal.highest >= refusal.attempt_id
    refusals = 0 if overtaken else peer.refusals + 1
    mute = turn.now + turn.rules.never_accepted_wait if refusals >= MAX_REFUSALS else peer.muted_until
    turn.set_peer(sender, replace(peer, refusals=refusals % MAX_REFUSALS, muted_until=mute))
    withdraw(turn, turn.rules.resend)


def enter(turn: Transition, start: Start) -> None:
    """Record the start of a world. Start the local ranks if this launcher is still in the world."""
    state, world = turn.state, start.world
    turn.set(started=highest(state.started, world.attempt_id))
    fresh = state.last is None or state.last < world.attempt_id
    if state.accepted_world != world or state.attempt is not None or not fresh or state.pending is not None:
        return
    if state.leaving is not None or state.ranks is not None:
        return
    turn.set(
        attempt=Attempt(world=world, master=start.master, since=turn.now, started_sent=turn.now),
        ranks=world.attempt_id,
        trained=world.attempt_id,
        stopping=False,
        idle_since=None,
        confirmed=None,
        confirmations=frozenset(),
    )
    turn.do(StartRanks(world=world, master=start.master, trained=state.trained))
