"""The launcher's rules: `step(state, event, now)` is all that decides. Pure: no sockets, processes, clock, chance.

The seam to the shell (`agent.py` and what it uses) is this small:

- The shell feeds events (`events.py`) one after the other and does the actions of each decision in order before it
  feeds the next. `Tick` at least four times a second. `now` is seconds since the epoch, on a clock that never goes
  back (wall time at start + monotonic). `State.me` is the pod UID; begin with `State(me=uid)`, then `Ready`.
- It keeps a channel open to every other member of `state.membership` and of `state.world` (see `contacts`), says
  `PeerUp` when one is authenticated, heartbeats on it by itself, and says `PeerDown` when it closed, was silent for
  `rules.dead_after`, or could not be opened for that long. Messages over it become `Received`; they may be lost or
  late, never altered. After `PeerUp` again, nothing of the earlier channel arrives.
- Events of ranks carry the pair for which the process was started (the connection's tag). Those of another pair
  than the present attempt's are dropped here.
- `StopRanks` is answered by `RanksEnded` when no local rank can vote in that pair or a lower one any more: its
  process is reaped, or said `left` for it and keeps its state in memory. Never before. So a process may outlive its
  attempt, and "no ranks of a lower pair are left" below means: none that could vote.
- A script that does not speak (`hello` never said): feed `Entered` when its processes are spawned, `LocalDone` when
  all ended with 0, and answer `QuiesceRanks` with `Quiesced` at once, since it cannot make an agreed commit.
- `status.json` is made of the state: `accepted`, `started`, `world`, `phase`, `message`, `incidents`, `foreign`,
  `lost_members(state)`; `exit` is the `Exit` action, which is the last.
- Give-up, drain and completion end in `Exit`; the shell flushes its channels and leaves with that code.

Invariants, asserted after each step: `accepted`, `started` and the membership's newness never fall; ranks start
only in the accepted world and when no others are left; an acceptance is said only when no rank of a lower pair is
left; nothing is done after `Exit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from holdfast.core.attempt import AttemptId, highest
from holdfast.core.protocol import Cause
from holdfast.launcher.membership import events, messages, proposals
from holdfast.launcher.membership.attempt_end import (
    budgets,
    completion,
    drain,
    failures,
    foreign_claims,
    incidents,
    leaving,
    root_cause,
)
from holdfast.launcher.membership.document import Member, Membership
from holdfast.launcher.membership.events import (
    Action,
    Event,
    How,
    KeepStacks,
    Note,
    RequestCheckpoint,
    Send,
    StartRanks,
)
from holdfast.launcher.membership.messages import Failure, Hello, Priority, ShareMembership
from holdfast.launcher.membership.quorum import NOTHING, Weakened
from holdfast.launcher.membership.state import Peer, Phase, State
from holdfast.launcher.membership.transition import Transition, lost


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The next state, and what the shell must do."""

    state: State
    actions: tuple[Action, ...]


def step(state: State, event: Event, now: float, weakened: Weakened = NOTHING) -> Decision:
    """Take one event in, and do all that follows from it. `weakened` is for tests of the rules."""
    if state.exit is not None:
        return Decision(state=state, actions=())
    turn = Transition(state, now, weakened)
    _HANDLERS[type(event)](turn, event)
    _follow(turn)
    check_invariants(state, turn.state, turn.actions)
    return Decision(state=turn.state, actions=tuple(turn.actions))


def _follow(turn: Transition) -> None:
    """Everything that follows from the state, in this order, whatever the event was."""
    drain.postpone_drain(turn)
    drain.heed_postponed(turn)
    drain.settle_quiesced(turn)
    failures.settle_failures(turn)
    drain.settle_drain(turn)
    proposals.accept(turn)
    proposals.pursue(turn)
    proposals.remind(turn)
    completion.complete(turn)
    waiting = _propose(turn)
    proposals.accept(turn)
    proposals.pursue(turn)
    _gossip(turn)
    _describe(turn, waiting)
    leaving.settle_leaving(turn)


def _propose(turn: Transition) -> proposals.Waiting:
    state = turn.state
    if state.leaving is not None or state.drain is not None or state.pending is not None:
        return state.phase, state.message
    if state.attempt is None and state.idle_since is None:
        turn.set(idle_since=turn.now)
    return proposals.propose(turn)


def contacts(state: State) -> dict[str, Member]:
    """Whom the shell keeps a channel to: the members of the newest membership and of the world here, less us."""
    known = {} if state.world is None else {member.pod_uid: member for member in state.world.members}
    if state.accepted_world is not None:
        known.update({member.pod_uid: member for member in state.accepted_world.members})
    if state.membership is not None:
        known.update({member.pod_uid: member for member in state.membership.members})
        known = {uid: member for uid, member in known.items() if uid not in state.membership.gone}
    known.pop(state.me, None)
    return known


def lost_members(state: State) -> tuple[tuple[str, float, How], ...]:
    """Members of the generation that this launcher takes for dead: pod UID, since when, how."""
    members = state.membership.uids if state.membership else frozenset()
    return tuple(
        (uid, peer.since, peer.how)
        for uid, peer in sorted(state.peers.items())
        if uid in members and not peer.up and peer.how is not None
    )


# Events


def _ready(turn: Transition, _: events.Ready) -> None:
    turn.set(ready=True)


def _prepared(turn: Transition, event: events.Prepared) -> None:
    turn.set(prepared=event.prepared)


def _tick(turn: Transition, _: events.Tick) -> None:
    """Time is in `now`."""


def _membership_seen(turn: Transition, event: events.MembershipSeen) -> None:
    see(turn, event.membership)


def see(turn: Transition, membership: Membership) -> None:
    """Rule 1: seeing a generation changes nothing but what may be proposed and accepted."""
    known = turn.membership
    if known is not None and _conflicts(known, membership.generation, membership.publication):
        turn.set(conflict=known.generation)
        return
    if known is not None and membership.newness <= known.newness:
        return
    new = known is None or membership.generation > known.generation
    incidents = tuple(i for i in turn.state.incidents if i.pair not in membership.acknowledged)
    turn.set(membership=membership, incidents=incidents, seen_at=turn.now if new else turn.state.seen_at)
    foreign_claims.stop_for(turn, ())
    if membership.checkpoint is not None:
        _ask(turn, membership.checkpoint.id, membership.checkpoint.reason)
    if turn.state.me in membership.drain:
        reason = f"the operator asked in revision {membership.revision}"
        drain.begin_drain(turn, events.DrainAsked(id=f"drain-{membership.revision}", reason=reason, cause=None))


def _conflicts(known: Membership, generation: int, publication: str) -> bool:
    return known.generation == generation and known.publication != publication


def _peer_up(turn: Transition, event: events.PeerUp) -> None:
    turn.set_peer(event.pod_uid, Peer(up=True, since=turn.now, met=True))
    if turn.state.hello is not None:
        turn.send(event.pod_uid, turn.state.hello)


def _peer_down(turn: Transition, event: events.PeerDown) -> None:
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


def _store_opened(turn: Transition, event: events.StoreOpened) -> None:
    proposal = turn.state.proposal
    if proposal is not None and proposal.world.pair == event.pair:
        turn.set(proposal=replace(proposal, master=event.master))


def _store_failed(turn: Transition, event: events.StoreFailed) -> None:
    proposal = turn.state.proposal
    if proposal is not None and proposal.world.pair == event.pair:
        turn.set(proposal=None, retry_at=turn.now + turn.rules.resend)
        turn.do(Note(phase=turn.state.phase, message=f"no store for {event.pair}: {event.message}"))


def _entered(turn: Transition, event: events.Entered) -> None:
    if _is_present(turn, event.pair):
        turn.set_attempt(entered=True)


def _step_made(turn: Transition, event: events.StepMade) -> None:
    if not _is_present(turn, event.pair):
        return
    incidents.resumed(turn, event)
    for id_, reason in turn.state.waiting_requests:
        turn.do(RequestCheckpoint(pair=event.pair, id=id_, reason=reason))
    turn.set(waiting_requests=())


def _rank_failed(turn: Transition, event: events.RankFailed) -> None:
    failure = event.failure if event.failure.at else replace(event.failure, at=turn.now)
    if _is_present(turn, event.pair):
        turn.fail(failure)
    else:
        incidents.know_better(turn, event.pair, failure)


def _stalled(turn: Transition, event: events.Stalled) -> None:
    """Only passed on: who hangs is judged beside the core."""
    turn.set(stalls=event.stalls)


def _hang_found(turn: Transition, event: events.HangFound) -> None:
    """Said before its attempt fails, so that the others' ranks still are where they waited when they hear it."""
    attempt = turn.attempt
    if attempt is not None and attempt.world.pair == event.pair:
        for uid in attempt.world.uids - {turn.state.me}:
            turn.send(uid, messages.Hang(pair=event.pair, message=event.message))


def _holds(turn: Transition, event: events.Holds) -> None:
    turn.set(held=event.held)


def _saves(turn: Transition, event: events.Saves) -> None:
    turn.set(saving=event.saving)


def _quiesced(turn: Transition, event: events.Quiesced) -> None:
    if _is_present(turn, event.pair):
        turn.set_attempt(quiesced_at=turn.now)


def _local_done(turn: Transition, event: events.LocalDone) -> None:
    if _is_present(turn, event.pair):
        turn.set_attempt(done=True, entered=True)
    if turn.state.ranks == event.pair:
        turn.set(ranks=None, stopping=False)


def _ranks_ended(turn: Transition, event: events.RanksEnded) -> None:
    ranks = turn.state.ranks
    if ranks is not None and ranks <= event.pair:
        turn.set(ranks=None, stopping=False)


def _foreign_claims(turn: Transition, event: events.ForeignClaims) -> None:
    foreign_claims.stop_for(turn, event.claims)
    if _is_present(turn, event.pair):
        incidents.close_attempt(
            turn, foreign_claims.FOREIGN
        )  # its ranks wait to be ended, also when we know the claims by now


def _checkpoint_asked(turn: Transition, event: events.CheckpointAsked) -> None:
    _ask(turn, event.id, event.reason)


def _ask(turn: Transition, id_: str, reason: str) -> None:
    """Pass a request on once; before the first step of an attempt it waits for that."""
    state = turn.state
    if id_ in state.requests:
        return
    turn.set(requests=state.requests | {id_})
    attempt = turn.attempt
    if attempt is not None and attempt.step is not None and not attempt.done:
        turn.do(RequestCheckpoint(pair=attempt.world.pair, id=id_, reason=reason))
    else:
        turn.set(waiting_requests=(*state.waiting_requests, (id_, reason)))


def _drain_asked(turn: Transition, event: events.DrainAsked) -> None:
    drain.begin_drain(turn, event)


def _is_present(turn: Transition, pair: AttemptId) -> bool:
    return turn.attempt is not None and turn.attempt.world.pair == pair


# Messages


def _received(turn: Transition, event: events.Received) -> None:
    if not turn.up(event.sender):
        return
    message = event.message
    match message:
        case Hello():
            _hello(turn, event.sender, message)
        case ShareMembership():
            see(turn, message.membership)
        case messages.Propose():
            proposals.consider(turn, event.sender, message)
        case messages.Accept():
            proposals.accepted_by(turn, event.sender, message.world)
        case messages.Refuse():
            proposals.refused_by(turn, event.sender, message)
        case messages.Start():
            proposals.enter(turn, message)
        case _:
            _received_of_the_end(turn, event.sender, message)


def _received_of_the_end(turn: Transition, sender: str, message: messages.Message) -> None:
    match message:
        case messages.Confirm():
            completion.confirm(turn, sender, message.pair)
        case messages.Confirmed():
            completion.confirmed_by(turn, sender, message.pair)
        case messages.Complete():
            completion.completed(turn, message.pair)
        case messages.GiveUp():
            budgets.give_up(turn, message.incident, message.message)
        case messages.Hang():
            _hang_elsewhere(turn, sender, message)
        case messages.Leaving():
            completion.left(turn, sender, message.code)
            _member_lost(turn, sender, How.LEFT)


def _hang_elsewhere(turn: Transition, sender: str, hang: messages.Hang) -> None:
    attempt = turn.attempt
    if attempt is not None and attempt.world.pair == hang.pair and sender in attempt.world.uids:
        turn.do(KeepStacks(pair=hang.pair, message=hang.message))


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
    """Give the newest membership to who has an older one: only one sidecar needs to reach the operator."""
    membership, peer = turn.membership, turn.state.peers[sender]
    if membership is None:
        return
    if _conflicts(membership, hello.generation, hello.publication):
        turn.set(conflict=membership.generation)
    elif (hello.generation, hello.revision) < membership.newness and turn.now >= peer.shared_at + turn.rules.resend:
        turn.set_peer(sender, replace(peer, shared_at=turn.now))
        turn.send(sender, ShareMembership(membership=membership))


def _compare(turn: Transition, sender: str, hello: Hello) -> None:
    """What a member says of our attempt: it failed there, or was left for a higher one."""
    attempt = turn.attempt
    if hello.failed is not None and hello.failure is not None and not hello.draining:
        incidents.know_better(turn, hello.failed, hello.failure)
    if attempt is None or sender not in attempt.world.uids:
        return
    pair = attempt.world.pair
    if hello.failed == pair and hello.failure is not None and not hello.draining:
        turn.fail(hello.failure)
    elif hello.left is not None and hello.left >= pair and (hello.draining or root_cause.drains(turn, attempt)):
        # Whoever heard first that the agreed commit is made may be told to have gone before our own rank says so.
        turn.set_attempt(quiesced_at=attempt.quiesced_at or turn.now)
    elif (highest(hello.accepted, _next(hello.left)) or pair) > pair and turn.state.pending is None:
        turn.fail(_moved_on(attempt.world.members, sender))


def _next(pair: AttemptId | None) -> AttemptId | None:
    return None if pair is None else AttemptId(pair.generation, pair.attempt + 1)


def _moved_on(members: tuple[Member, ...], sender: str) -> Failure:
    member = next(m for m in members if m.pod_uid == sender)
    return Failure(
        cause=Cause.INFRASTRUCTURE,
        reason=failures.MOVED_ON,
        message=f"{member.pod or sender} is in this attempt no more",
        priority=Priority.PEER_LOST,
        pod=member.pod,
        node=member.node,
    )


# What is said and shown


def _gossip(turn: Transition) -> None:
    """Say the whole present to all: on every change, and once a second."""
    hello = _present(turn)
    if hello == turn.state.hello and turn.now < turn.state.hello_at + turn.rules.resend:
        return
    turn.set(hello=hello, hello_at=turn.now)
    turn.broadcast(hello)


def _present(turn: Transition) -> Hello:
    state, attempt = turn.state, turn.attempt
    failed, failure = state.failed, state.failure
    drained = root_cause.drain_incident(turn)
    if drained is not None:
        failed, failure = drained
    elif attempt is not None and attempt.failures:
        failed, failure = attempt.world.pair, root_cause.root_cause(turn, attempt)
    return Hello(
        generation=state.membership.generation if state.membership else 0,
        revision=state.membership.revision if state.membership else 0,
        publication=state.membership.publication if state.membership else "",
        accepted=state.accepted,
        started=state.started,
        world=attempt.world if attempt is not None and not attempt.failures else None,
        left=state.last,
        ready=state.ready and state.leaving is None,
        prepared=state.prepared,
        draining=state.drain is not None,
        stays=drain.would_stay(turn),
        notice=drain.notice(turn),
        done=attempt is not None and attempt.done,
        failed=failed,
        failure=failure,
        foreign=state.foreign,
        stalls=state.stalls,
        held=state.held,
    )


def _describe(turn: Transition, waiting: proposals.Waiting) -> None:
    phase, message = _phase(turn, waiting)
    if (phase, message) == (turn.state.phase, turn.state.message):
        return
    if phase != turn.state.phase:
        turn.do(Note(phase=phase, message=message))
    turn.set(phase=phase, message=message)


def _phase(turn: Transition, waiting: proposals.Waiting) -> proposals.Waiting:
    state = turn.state
    if state.leaving is not None:
        if state.leaving.code == 0:
            return Phase.COMPLETE, state.leaving.message
        return (Phase.FAILED if state.leaving.final else Phase.DRAINING), state.leaving.message
    if state.drain is not None:
        return Phase.DRAINING, f"commits and leaves: {state.drain.reason}"
    if state.pending is not None:
        return Phase.FORMING, f"goes over to {state.pending.world.pair}"
    if state.attempt is None and state.postponed is not None:
        return waiting[0], f"{waiting[1]}; then commits and leaves: {state.postponed.reason}"
    if state.attempt is None:
        return waiting
    if state.attempt.done:
        return Phase.RUNNING, "done here; waits for the others"
    size = len(state.membership.members) if state.membership else len(state.attempt.world.members)
    return Phase.RUNNING, f"training with {len(state.attempt.world.members)} of {size} workers"


def check_invariants(before: State, after: State, actions: list[Action]) -> None:
    """What no step may break."""
    for name in ("accepted", "started", "trained"):
        old, new = getattr(before, name), getattr(after, name)
        if old is not None and (new is None or new < old):
            raise AssertionError(f"{name} fell from {old} to {new}")
    if before.membership and after.membership and after.membership.newness < before.membership.newness:
        raise AssertionError("the membership became older")
    if after.exit is not None and actions[-1] != after.exit:
        raise AssertionError("something was done after the exit")
    for action in actions:
        if isinstance(action, StartRanks) and after.ranks != action.world.pair:
            raise AssertionError(f"ranks of {action.world.pair} start beside {after.ranks}")
        if isinstance(action, Send) and isinstance(action.message, messages.Accept):
            pair = action.message.world.pair
            if after.accepted is None or after.accepted < pair or (after.ranks or pair) < pair:
                raise AssertionError(f"accepted {pair} while ranks of {after.ranks} are left")


_HANDLERS: Final[dict[type[Any], Callable[[Transition, Any], None]]] = {
    events.Ready: _ready,
    events.Tick: _tick,
    events.Prepared: _prepared,
    events.MembershipSeen: _membership_seen,
    events.PeerUp: _peer_up,
    events.PeerDown: _peer_down,
    events.Received: _received,
    events.StoreOpened: _store_opened,
    events.StoreFailed: _store_failed,
    events.Entered: _entered,
    events.StepMade: _step_made,
    events.RankFailed: _rank_failed,
    events.Stalled: _stalled,
    events.HangFound: _hang_found,
    events.Holds: _holds,
    events.Saves: _saves,
    events.Quiesced: _quiesced,
    events.LocalDone: _local_done,
    events.RanksEnded: _ranks_ended,
    events.ForeignClaims: _foreign_claims,
    events.CheckpointAsked: _checkpoint_asked,
    events.DrainAsked: _drain_asked,
}
