"""Forming worlds: who proposes what, who accepts, when a world starts. Pure; rules 1 to 4, 6 and 7 of the protocol.

Invariants: an acceptance is sent only when no local rank of a lower pair is left; what was accepted never falls;
a launcher that trains in a healthy attempt gives it up only for a world that keeps all who train with it and stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdfast.core.attempt import AttemptId, highest
from holdfast.launcher.membership import quorum as rules
from holdfast.launcher.membership.attempt_end.drain import hear_of_the_end
from holdfast.launcher.membership.attempt_end.incidents import adopt_incident, close_attempt
from holdfast.launcher.membership.attempt_end.root_cause import sent_away
from holdfast.launcher.membership.document import Member, Membership
from holdfast.launcher.membership.events import OpenStore, QuiesceRanks, StartRanks
from holdfast.launcher.membership.messages import (
    Accept,
    Incident,
    Master,
    Priority,
    Propose,
    Refuse,
    Remedy,
    Start,
    World,
)
from holdfast.launcher.membership.state import Attempt, Pending, Phase, Proposal, Quiesce
from holdfast.launcher.membership.transition import Transition

Waiting = tuple[Phase, str]
PATIENCE = 3


# Proposing


def propose(turn: Transition) -> Waiting:
    """Propose a world if it is our turn and one is due; says what is waited for otherwise."""
    membership = turn.membership
    held = _held(turn)
    if membership is None or held is not None:
        return held or (Phase.WAITING, "waits for the first membership")
    if turn.state.proposal is not None:
        return Phase.FORMING, f"proposed {turn.state.proposal.world.pair}"
    if turn.attempt is not None and turn.attempt.failures:  # its budget and back-off are judged first
        return Phase.FORMING, f"{turn.attempt.world.pair} failed; hears what the others saw of it"
    running = _running(turn)
    if running is not None:
        return _grow(turn, membership, running)
    return _form(turn, membership)


def _held(turn: Transition) -> Waiting | None:
    """Why no world at all is proposed or accepted here."""
    state, membership = turn.state, turn.membership
    if not state.ready:
        return Phase.STARTING, "the control channel is not open yet"
    if membership is None:
        return Phase.WAITING, "waits for the first membership"
    if state.conflict == membership.generation:
        return Phase.WAITING, f"generation {membership.generation} was published twice; waits for a higher one"
    if state.foreign:
        claim = max(state.foreign)
        return Phase.WAITING, (
            f"claim {claim.pair} of job {claim.job_uid}, publication {claim.publication}, is on the checkpoint"
            " folder; waits for a generation above it"
        )
    gap = rules.missing_generation(membership, turn.started())
    if gap is not None:
        return Phase.WAITING, f"the membership does not list generation {gap}, which may still hold a world"
    top = _highest_accepted(turn)
    if top is not None and top.generation > membership.generation:
        return Phase.WAITING, f"{top} is accepted; waits for the membership of generation {top.generation}"
    if membership.member(state.me) is None:
        return Phase.WAITING, f"stands by: not a member of generation {membership.generation}"
    return None


def _running(turn: Transition) -> World | None:
    """The world that trains now, here or as a live peer says."""
    state = turn.state
    worlds = [hello.world for uid in state.peers if (hello := turn.hello(uid)) and hello.world]
    if state.attempt is not None:
        worlds.append(state.attempt.world)
    newest = max(worlds, key=lambda world: world.pair, default=None)
    return newest if newest is not None and not _known_to_have_failed(turn, newest.pair) else None


def _known_to_have_failed(turn: Transition, pair: AttemptId) -> bool:
    own = turn.state.failed
    return (own is not None and own >= pair) or any(
        hello.failed is not None and hello.failed >= pair and not hello.draining
        for uid in turn.state.peers
        if (hello := turn.hello(uid))
    )


def _grow(turn: Transition, membership: Membership, running: World) -> Waiting:
    """Take in those who are ready and not in the running world, without leaving anybody of it."""
    message = _trains(running, membership)
    waiting = (Phase.RUNNING, message) if turn.attempt else (Phase.WAITING, f"waits to join; others are {message}")
    if any(turn.hello(uid) and turn.on_its_way_out(uid) for uid in running.uids):
        return waiting
    usable = turn.usable_members()
    keep = [member for member in usable if member.pod_uid in running.uids]
    if {m.pod_uid for m in keep} != running.uids or not _my_turn(turn, membership, usable):
        return waiting
    newcomers = [member for member in usable if member.pod_uid not in running.uids and _settled(turn, member)]
    newcomers = [member for member in newcomers if _prepared(turn, member)]
    together = tuple(member for member in usable if member in keep or member in newcomers)
    if not newcomers or turn.now < turn.state.retry_at or _worth_waiting(turn, membership, together):
        return waiting
    if turn.state.saving:  # a rank that is asked to part may not be done in time, and is ended with all it has made
        return waiting
    chosen = _in_steps(membership, keep, newcomers)
    if len(chosen) <= len(keep) or not all(_has_heard(turn, membership, member) for member in chosen):
        return waiting
    refused = _try(turn, membership, chosen, None, turn.rules.checkpoint_deadline)
    return refused or (Phase.FORMING, f"grows from {len(keep)} to {len(chosen)} workers")


def _form(turn: Transition, membership: Membership) -> Waiting:
    """Nothing trains: form the largest world of those who live."""
    usable = turn.usable_members()
    if _may_start(turn, membership):
        return Phase.FORMING, f"waits for the start of {turn.state.accepted}"
    if turn.now < turn.state.not_before:
        return Phase.FORMING, f"backs off for {turn.state.not_before - turn.now:.0f} s after {turn.state.failed}"
    chosen = _largest(turn, membership, usable)
    order = tuple(sorted(usable, key=lambda member: member not in chosen))  # who proposes is in that world
    verdict = rules.may_be(membership, _uids(chosen), turn.started(), turn.weakened)
    if not verdict.ok:
        return (Phase.AWAITING_FENCE if verdict.fence else Phase.WAITING), verdict.reason
    if _first_attempt(turn, membership) and _worth_waiting(turn, membership, usable):
        return Phase.FORMING, f"{len(usable)} of {len(membership.members)} workers are here; waits for the others"
    if _replacement_may_come(turn, membership, chosen):
        wait = membership.rules.shrink_after
        return Phase.FORMING, f"{len(chosen)} workers wait up to {wait:.0f} s for a replacement (shrinkAfterSeconds)"
    if turn.now < turn.state.retry_at or not _my_turn(turn, membership, order):
        return Phase.FORMING, f"waits for a proposal of {order[0].pod or order[0].pod_uid}"
    refused = _try(turn, membership, chosen, _what_ended_it(turn), 0.0)
    return refused or (Phase.FORMING, f"proposes a world of {len(chosen)}")


def _largest(turn: Transition, membership: Membership, usable: tuple[Member, ...]) -> tuple[Member, ...]:
    """The largest world, with each shard of a sharded model if that may be: nobody waits for a shard."""
    said = {member.pod_uid: turn.held(member.pod_uid) for member in usable}
    held = {uid: one for uid, one in said.items() if one is not None}
    whole = rules.largest_world(membership.rules, usable, held)
    if rules.may_be(membership, _uids(whole), turn.started(), turn.weakened).ok:
        return whole
    return rules.largest_world(membership.rules, usable)


def _may_start(turn: Transition, membership: Membership) -> bool:
    """Whether what was accepted here of another may start any moment, or has: a rival world would break it up, and
    that is a failure which nobody had."""
    state, world = turn.state, turn.state.accepted_world
    if world is None or world.coordinator == state.me or turn.on_its_way_out(world.coordinator):
        return False
    if world.pair != _highest_accepted(turn) or _known_to_have_failed(turn, world.pair):
        return False
    return state.idle_since is not None and turn.now < state.idle_since + membership.rules.accept_deadline


def _my_turn(turn: Transition, membership: Membership, usable: tuple[Member, ...]) -> bool:
    """The lowest live index proposes; the next ones step in if it does nothing for long."""
    order = [member.pod_uid for member in usable]
    if turn.state.me not in order:
        return False
    place = order.index(turn.state.me)
    idle = 0.0 if turn.state.idle_since is None else turn.now - turn.state.idle_since
    patience = membership.rules.shrink_after + place * membership.rules.never_accepted_wait
    return place == 0 or (turn.attempt is None and idle > patience)


def _replacement_may_come(turn: Transition, membership: Membership, chosen: tuple[Member, ...]) -> bool:
    """Whether a shrink is to wait: only the proposer asks, so nothing that is safe becomes unsafe by it. Proposals
    that come to nothing do not prolong the wait."""
    rules, last, since = membership.rules, turn.state.last_world, turn.state.ended_at
    if last is None or last.uids <= _uids(chosen) or len(chosen) >= rules.replicas:
        return False
    return since is not None and turn.now < since + rules.shrink_after


def _first_attempt(turn: Transition, membership: Membership) -> bool:
    top = _highest_accepted(turn)
    return top is None or top.generation < membership.generation


def _highest_accepted(turn: Transition) -> AttemptId | None:
    peers = [hello.accepted for uid in turn.state.peers if (hello := turn.hello(uid))]
    return highest(turn.state.accepted, turn.state.refused, turn.started(), *peers)


def _worth_waiting(turn: Transition, membership: Membership, usable: tuple[Member, ...]) -> bool:
    """Whether a member may still come: not proved gone, and not seen and lost."""
    if turn.now >= turn.state.seen_at + membership.rules.first_attempt_wait:
        return False
    absent = membership.uids - _uids(usable) - membership.gone
    return any(not _seen_and_lost(turn, uid) for uid in absent)


def _seen_and_lost(turn: Transition, uid: str) -> bool:
    peer = turn.state.peers.get(uid)
    return peer is not None and ((peer.met and not peer.up) or peer.muted_until > turn.now)


def _has_heard(turn: Transition, membership: Membership, member: Member) -> bool:
    """Whether it knows the generation: who does not refuses its worlds, and the others would have stopped for it."""
    hello = turn.hello(member.pod_uid)
    return member.pod_uid == turn.state.me or (
        hello is not None and (hello.generation, hello.publication) == (membership.generation, membership.publication)
    )


def _settled(turn: Transition, member: Member) -> bool:
    """A newcomer's channel has held for a moment: a flapping link must not cost the others their time."""
    peer = turn.state.peers.get(member.pod_uid)
    return peer is None or turn.now >= peer.since + turn.rules.dead_after


def _prepared(turn: Transition, member: Member) -> bool:
    """A newcomer's ranks get ready while the others train; but nobody waits for ever for one that does not."""
    if member.pod_uid == turn.state.me:
        return turn.state.prepared or turn.now >= turn.state.seen_at + turn.rules.startup_deadline
    peer, hello = turn.state.peers.get(member.pod_uid), turn.hello(member.pod_uid)
    if peer is None or hello is None:
        return False
    return hello.prepared or turn.now >= peer.since + turn.rules.startup_deadline


def _in_steps(membership: Membership, keep: list[Member], newcomers: list[Member]) -> tuple[Member, ...]:
    size = len(keep) + len(newcomers)
    room = size - size % membership.rules.replica_step - len(keep)
    return tuple(sorted([*keep, *newcomers[: max(room, 0)]]))


def _what_ended_it(turn: Transition) -> Incident | None:
    """The incident that ended the last world that started, if it did not end by agreement."""
    last = turn.started()
    own = next((incident for incident in turn.state.incidents if incident.pair == last), None)
    if own is not None or last is None or turn.state.failed == last:
        return own
    failures = [
        hello.failure
        for uid in turn.state.peers
        if (hello := turn.hello(uid)) and hello.failed == last and hello.failure
    ]
    if turn.state.last_world is not None and sent_away(turn, turn.state.last_world):
        failures = [failure for failure in failures if failure.priority is not Priority.PEER_LOST]
    if not failures:
        return None
    root = min(failures, key=lambda failure: failure.rank_of_root)
    return Incident(pair=last, failure=root, action=Remedy.WAIT, detected=root.at or turn.now)


def _try(
    turn: Transition, membership: Membership, chosen: tuple[Member, ...], incident: Incident | None, patience: float
) -> Waiting | None:
    """Propose it, unless a rule says no; returns what says no."""
    verdict = rules.may_be(membership, _uids(chosen), turn.started(), turn.weakened)
    if not verdict.ok:
        return (Phase.AWAITING_FENCE if verdict.fence else Phase.WAITING), verdict.reason
    top = _highest_accepted(turn)
    attempt = top.attempt + 1 if top is not None and top.generation == membership.generation else 1
    world = World(
        pair=AttemptId(membership.generation, attempt),
        publication=membership.publication,
        members=chosen,
        coordinator=turn.state.me,
    )
    if incident is not None:
        remedy = Remedy.IN_PLACE if _uids(chosen) >= _world_of(turn, incident.pair) else Remedy.SHRINK
        incident = replace(incident, action=remedy)
    turn.set(
        proposal=Proposal(
            world=world,
            incident=incident,
            since=turn.now,
            sent=turn.now,
            until=turn.now + membership.rules.accept_deadline + patience,
        )
    )
    turn.do(OpenStore(pair=world.pair, beside=turn.attempt.world.pair if turn.attempt is not None else None))
    _say(turn, world.uids)
    consider(turn, turn.state.me, Propose(world=world, started=turn.started(), incident=incident))
    return None


def _world_of(turn: Transition, pair: AttemptId) -> frozenset[str]:
    known = (turn.state.accepted_world, turn.state.last_world)
    return next((world.uids for world in known if world is not None and world.pair == pair), frozenset())


def _say(turn: Transition, uids: Iterable[str]) -> None:
    proposal = turn.state.proposal
    if proposal is not None:
        message = Propose(world=proposal.world, started=turn.started(), incident=proposal.incident)
        for uid in sorted(uids):
            turn.send(uid, message)


def pursue(turn: Transition) -> None:
    """Bring our own proposal to its end: started, or given up."""
    proposal = turn.state.proposal
    if proposal is None:
        return
    uids = proposal.world.uids
    overtaken = turn.state.accepted is not None and turn.state.accepted > proposal.world.pair
    if (
        overtaken
        or turn.state.drain is not None
        or any(turn.on_its_way_out(uid) and not turn.stays(uid) for uid in uids)
    ):
        _give_way(turn, 0.0)
    elif proposal.accepted >= uids and proposal.master is not None:
        _start(turn, proposal, proposal.master)
    elif turn.now >= proposal.until:
        for uid in uids - proposal.accepted - {turn.state.me}:
            peer = turn.state.peers[uid]
            turn.set_peer(uid, replace(peer, muted_until=turn.now + turn.rules.never_accepted_wait))
        _give_way(turn, 0.0)
    elif turn.now >= proposal.sent + turn.rules.resend:
        turn.set(proposal=replace(proposal, sent=turn.now))
        _say(turn, uids - proposal.accepted)


def _give_way(turn: Transition, pause: float) -> None:
    """Two who propose at once must not do so for ever: the higher index looks away for longer."""
    place = sum(1 for member in turn.usable_members() if member.pod_uid != turn.state.me and _before(turn, member))
    turn.set(proposal=None, retry_at=turn.now + pause * (1 + place))


def _before(turn: Transition, member: Member) -> bool:
    me = turn.membership.member(turn.state.me) if turn.membership else None
    return me is not None and member.index < me.index


def _start(turn: Transition, proposal: Proposal, master: Master) -> None:
    """Rule 2: all accepted exactly this."""
    turn.set(proposal=None)
    started = Start(world=proposal.world, master=master)
    for uid in sorted(proposal.world.uids):
        turn.send(uid, started)
    enter(turn, started)


def remind(turn: Transition) -> None:
    """Say `Start` again to members that have not heard it."""
    attempt = turn.attempt
    if attempt is None or attempt.world.coordinator != turn.state.me:
        return
    if turn.now < attempt.started_sent + turn.rules.resend:
        return
    turn.set_attempt(started_sent=turn.now)
    for uid in sorted(attempt.world.uids):
        hello = turn.hello(uid)
        if hello is not None and hello.world != attempt.world and hello.accepted == attempt.world.pair:
            turn.send(uid, Start(world=attempt.world, master=attempt.master))


# Accepting


def consider(turn: Transition, sender: str, proposal: Propose) -> None:
    """A proposal: refuse it, or set out to accept it."""
    world, state = proposal.world, turn.state
    if state.accepted == world.pair and state.accepted_world == world:
        if state.pending is None:
            _answer(turn, world)
        return
    if state.pending is not None and state.pending.world == world:
        return
    hear_of_the_end(turn, proposal.incident)
    reason = _objection(turn, proposal)
    if reason is not None:
        turn.refuse(sender, world.pair, reason)
        if sender == state.me:
            _give_way(turn, turn.rules.resend)
        return
    turn.set(pending=Pending(world=world, incident=proposal.incident))
    if _must_finish(turn, proposal):
        _quiesce(turn, f"grow-{world.pair}", "a worker joins")
    else:
        _promise(turn)


def _objection(turn: Transition, proposal: Propose) -> str | None:
    """Why this proposal is not accepted, or None."""
    state, world, membership = turn.state, proposal.world, turn.membership
    if state.drain is not None or state.leaving is not None:
        return "leaving"
    if _confirmed_to_live_coordinator(turn):
        return "all are done; the job completes"
    if membership is None or membership.generation < world.pair.generation:
        return f"generation {world.pair.generation} is not known here"
    if membership.generation > world.pair.generation:
        return f"generation {membership.generation} is published"
    if membership.publication != world.publication:
        turn.set(conflict=membership.generation)
    if (held := _held(turn)) is not None:
        return held[1]
    if state.me not in world.uids:
        return "not a member of that world"
    if state.accepted is not None and world.pair <= state.accepted:
        return f"{state.accepted} is accepted"
    verdict = rules.may_be(membership, world.uids, highest(turn.started(), proposal.started), turn.weakened)
    return verdict.reason if not verdict.ok else _still_training(turn, proposal)


def _confirmed_to_live_coordinator(turn: Transition) -> bool:
    attempt = turn.attempt
    if turn.state.confirmed is None or attempt is None:
        return False
    return turn.up(attempt.world.coordinator)


def _healthy(turn: Transition, proposal: Propose) -> bool:
    """Whether our attempt goes on, as far as we and the proposer know."""
    attempt = turn.attempt
    if attempt is None or attempt.failures:
        return False
    return proposal.incident is None or proposal.incident.pair < attempt.world.pair


def _still_training(turn: Transition, proposal: Propose) -> str | None:
    attempt = turn.attempt
    if attempt is None or not _healthy(turn, proposal):
        return None
    if attempt.done:
        return f"{attempt.world.pair} is done here"
    if turn.state.saving and proposal.world.coordinator not in attempt.world.uids:  # who stepped in to be taken in
        return f"{attempt.world.pair} is in a checkpoint"
    left_out = [uid for uid in attempt.world.uids - proposal.world.uids if not turn.on_its_way_out(uid)]
    return f"{attempt.world.pair} trains, and {', '.join(sorted(left_out))} is left out" if left_out else None


def _must_finish(turn: Transition, proposal: Propose) -> bool:
    """Whether there is something to lose: steps were made and no agreed commit ended them."""
    attempt = turn.attempt
    if attempt is None or not _healthy(turn, proposal):
        return False
    return attempt.step is not None and attempt.quiesced_at is None


def _quiesce(turn: Transition, request: str, reason: str) -> None:
    attempt = turn.attempt
    if attempt is not None and attempt.quiesce is None:
        until = turn.now + turn.rules.checkpoint_deadline
        turn.set_attempt(quiesce=Quiesce(id=request, reason=reason, until=until))
        turn.do(QuiesceRanks(pair=attempt.world.pair, id=request, reason=reason, commit=False))


def accept(turn: Transition) -> None:
    """Carry a pending acceptance on: the agreed commit (or its deadline), the old ranks' end, the answer."""
    pending, attempt = turn.state.pending, turn.attempt
    if pending is None:
        return
    if not pending.promised and not _waits_for_commit(turn, attempt):
        _promise(turn)
        pending = turn.state.pending
    if pending is not None and pending.promised and turn.state.ranks is None:
        turn.set(pending=None)
        _answer(turn, pending.world)


def _waits_for_commit(turn: Transition, attempt: Attempt | None) -> bool:
    if attempt is None or attempt.failures or attempt.quiesced_at is not None or attempt.quiesce is None:
        return False
    return turn.now < attempt.quiesce.until


def _promise(turn: Transition) -> None:
    """Rule 1: all lower pairs are left for good, from here on."""
    pending = turn.state.pending
    if pending is None:
        return
    if pending.incident is not None:
        adopt_incident(turn, pending.incident)
    close_attempt(turn, f"{pending.world.pair} follows")
    turn.set(
        accepted=pending.world.pair,
        accepted_world=pending.world,
        pending=replace(pending, promised=True),
        confirmed=None,
        idle_since=turn.now,
    )


def _answer(turn: Transition, world: World) -> None:
    if world.coordinator == turn.state.me:
        accepted_by(turn, turn.state.me, world)
    else:
        turn.send(world.coordinator, Accept(world=world))


def accepted_by(turn: Transition, sender: str, world: World) -> None:
    """An acceptance of our proposal; it must echo exactly what was proposed."""
    proposal = turn.state.proposal
    if proposal is not None and proposal.world == world and sender in world.uids:
        turn.set(proposal=replace(proposal, accepted=proposal.accepted | {sender}))
        if (peer := turn.state.peers.get(sender)) is not None:
            turn.set_peer(sender, replace(peer, refusals=0))


def refused_by(turn: Transition, sender: str, refusal: Refuse) -> None:
    """A refusal of our proposal: give way, look again in a moment; who refuses time and again is left out."""
    turn.set(refused=highest(turn.state.refused, refusal.highest))
    proposal, peer = turn.state.proposal, turn.state.peers[sender]
    if proposal is None or proposal.world.pair != refusal.pair:
        return
    overtaken = refusal.highest is not None and refusal.highest >= refusal.pair
    refusals = 0 if overtaken else peer.refusals + 1
    mute = turn.now + turn.rules.never_accepted_wait if refusals >= PATIENCE else peer.muted_until
    turn.set_peer(sender, replace(peer, refusals=refusals % PATIENCE, muted_until=mute))
    _give_way(turn, turn.rules.resend)


def enter(turn: Transition, start: Start) -> None:
    """The world has started: record it, and start our ranks if we are still in it."""
    state, world = turn.state, start.world
    turn.set(started=highest(state.started, world.pair))
    fresh = state.last is None or state.last < world.pair
    if state.accepted_world != world or state.attempt is not None or not fresh or state.pending is not None:
        return
    if state.leaving is not None or state.ranks is not None:
        return
    turn.set(
        attempt=Attempt(world=world, master=start.master, since=turn.now, started_sent=turn.now),
        ranks=world.pair,
        trained=world.pair,
        stopping=False,
        idle_since=None,
        confirmed=None,
        confirmations=frozenset(),
    )
    turn.do(StartRanks(world=world, master=start.master, trained=state.trained))


def _uids(members: Iterable[Member]) -> frozenset[str]:
    return frozenset(member.pod_uid for member in members)


def _trains(world: World, membership: Membership) -> str:
    return f"training with {len(world.members)} of {len(membership.members)} workers"
