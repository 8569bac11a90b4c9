"""The launcher's state machine: `step(state, event, now)` decides. Pure: no sockets, processes, clock or randomness.

The interface to the rest of the launcher (`launcher.py` and the modules that it uses):

- The launcher feeds events (`events.py`) one by one. It carries out the actions of each decision in order before it
  feeds the next event. It feeds `Tick` at least four times per second. `now` is seconds since the epoch on a clock
  that never goes back (wall time at the start + monotonic time). `State.me` is the pod UID. Begin with
  `State(me=uid)`, then feed `Ready`.
- The launcher keeps a channel open to every other member of `state.membership` and of `state.world` (see `contacts`).
  It feeds `PeerUp` when a channel is authenticated, and sends heartbeats on it. It feeds `PeerDown` when the channel
  closed, was silent for `rules.dead_after`, or could not be opened for that long. Messages on the channel become
  `Received`. They may be lost or late, but never altered. After another `PeerUp`, nothing from the earlier channel
  arrives.
- Events of ranks carry the attempt ID for which the process was started (the tag of its connection). Events of any
  attempt except the current one are dropped here.
- After `StopRanks`, the launcher feeds `RanksEnded` when no local rank can vote in that attempt or a lower one any
  more, and never before. Each process is reaped, or has sent `left` for the attempt and keeps its state in memory. So
  a process may outlive its attempt. Below, "no ranks of a lower attempt are left" means: none that could vote.
- For a script without Holdfast's loop (`hello` is never sent): feed `Entered` when its processes are started, and
  `LocalDone` when all ended with 0. Answer `QuiesceRanks` with `Quiesced` at once, since the script cannot write an
  agreed checkpoint.
- `status.json` is created from the state: `accepted`, `started`, `world`, `phase`, `message`, `incidents`, `foreign`,
  `lost_members(state)`. `exit` is the `Exit` action, which is the last one.
- A failed job, a drain and completion end in `Exit`. The launcher flushes its channels and exits with that code.

Invariants, asserted after each step:

- `accepted`, `started` and the membership's newness never decrease.
- Ranks start only in the accepted world, and only when no other ranks are left.
- An acceptance is sent only when no rank of a lower attempt is left.
- No action follows `Exit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from holdfast.core.attempt import AttemptId
from holdfast.launcher.membership import events, messages
from holdfast.launcher.membership.attempt_end import completion, drain, failures, foreign_claims, incidents, leaving
from holdfast.launcher.membership.document import Member
from holdfast.launcher.membership.events import Action, Event, How, Note, RequestCheckpoint, Send, StartRanks
from holdfast.launcher.membership.formation import acceptance, proposal_answers, proposals
from holdfast.launcher.membership.hello import describe, send_hello
from holdfast.launcher.membership.membership_update import request_checkpoint, update_membership
from holdfast.launcher.membership.peers import peer_down, peer_up, received
from holdfast.launcher.membership.quorum import NOTHING, WeakenedQuorum
from holdfast.launcher.membership.state import State
from holdfast.launcher.membership.transition import Transition


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The next state, and the actions for the launcher."""

    state: State
    actions: tuple[Action, ...]


def step(state: State, event: Event, now: float, weakened: WeakenedQuorum = NOTHING) -> Decision:
    """Process one event and everything that follows from it. `weakened` is for tests of the rules."""
    if state.exit is not None:
        return Decision(state=state, actions=())
    turn = Transition(state, now, weakened)
    _HANDLERS[type(event)](turn, event)
    _follow(turn)
    check_invariants(state, turn.state, turn.actions)
    return Decision(state=turn.state, actions=tuple(turn.actions))


def _follow(turn: Transition) -> None:
    """Derive everything that follows from the state, in this order, independent of the event."""
    drain.postpone_drain(turn)
    drain.resume_postponed_drain(turn)
    drain.settle_quiesced(turn)
    failures.settle_failures(turn)
    drain.settle_drain(turn)
    acceptance.accept(turn)
    proposal_answers.pursue(turn)
    proposal_answers.remind(turn)
    completion.complete(turn)
    waiting = _propose(turn)
    acceptance.accept(turn)
    proposal_answers.pursue(turn)
    send_hello(turn)
    describe(turn, waiting)
    leaving.settle_leaving(turn)


def _propose(turn: Transition) -> acceptance.Waiting:
    state = turn.state
    if state.leaving is not None or state.drain is not None or state.pending is not None:
        return state.phase, state.message
    if state.attempt is None and state.idle_since is None:
        turn.set(idle_since=turn.now)
    return proposals.propose(turn)


def contacts(state: State) -> dict[str, Member]:
    """Return the peers to keep a channel to: all other members of the newest membership and of this world."""
    known = {} if state.world is None else {member.pod_uid: member for member in state.world.members}
    if state.accepted_world is not None:
        known.update({member.pod_uid: member for member in state.accepted_world.members})
    if state.membership is not None:
        known.update({member.pod_uid: member for member in state.membership.members})
        known = {uid: member for uid, member in known.items() if uid not in state.membership.gone}
    known.pop(state.me, None)
    return known


def lost_members(state: State) -> tuple[tuple[str, float, How], ...]:
    """Return the members of the generation that this launcher counts as lost: pod UID, since when, how."""
    members = state.membership.uids if state.membership else frozenset()
    return tuple(
        (uid, peer.since, peer.how)
        for uid, peer in sorted(state.peers.items())
        if uid in members and not peer.up and peer.how is not None
    )


def _ready(turn: Transition, _: events.Ready) -> None:
    turn.set(ready=True)


def _prepared(turn: Transition, event: events.Prepared) -> None:
    turn.set(prepared=event.prepared)


def _tick(turn: Transition, _: events.Tick) -> None:
    """Do nothing: the time is in `now`."""


def _membership_seen(turn: Transition, event: events.MembershipSeen) -> None:
    update_membership(turn, event.membership)


def _store_opened(turn: Transition, event: events.StoreOpened) -> None:
    proposal = turn.state.proposal
    if proposal is not None and proposal.world.attempt_id == event.attempt_id:
        turn.set(proposal=replace(proposal, master=event.master))


def _store_failed(turn: Transition, event: events.StoreFailed) -> None:
    proposal = turn.state.proposal
    if proposal is not None and proposal.world.attempt_id == event.attempt_id:
        turn.set(proposal=None, retry_at=turn.now + turn.rules.resend)
        turn.do(Note(phase=turn.state.phase, message=f"no store for {event.attempt_id}: {event.message}"))


def _entered(turn: Transition, event: events.Entered) -> None:
    if _is_present(turn, event.attempt_id):
        turn.set_attempt(entered=True)


def _step_made(turn: Transition, event: events.StepMade) -> None:
    if not _is_present(turn, event.attempt_id):
        return
    incidents.resumed(turn, event)
    for id_, reason in turn.state.waiting_requests:
        turn.do(RequestCheckpoint(attempt_id=event.attempt_id, id=id_, reason=reason))
    turn.set(waiting_requests=())


def _rank_failed(turn: Transition, event: events.RankFailed) -> None:
    failure = event.failure if event.failure.at else replace(event.failure, at=turn.now)
    if _is_present(turn, event.attempt_id):
        turn.fail(failure)
    else:
        incidents.revise_incident(turn, event.attempt_id, failure)


def _stalled(turn: Transition, event: events.Stalled) -> None:
    """Pass on the stalls; the hang detectors judge them outside of the state machine."""
    turn.set(stalls=event.stalls)


def _hang_found(turn: Transition, event: events.HangFound) -> None:
    """Broadcast a hang before its attempt fails, so that the others can save stacks while their ranks still wait."""
    attempt = turn.attempt
    if attempt is not None and attempt.world.attempt_id == event.attempt_id:
        for uid in attempt.world.uids - {turn.state.me}:
            turn.send(uid, messages.Hang(attempt_id=event.attempt_id, message=event.message))


def _holds(turn: Transition, event: events.Holds) -> None:
    turn.set(held=event.held)


def _saves(turn: Transition, event: events.Saves) -> None:
    turn.set(saving=event.saving)


def _quiesced(turn: Transition, event: events.Quiesced) -> None:
    if _is_present(turn, event.attempt_id):
        turn.set_attempt(quiesced_at=turn.now)


def _local_done(turn: Transition, event: events.LocalDone) -> None:
    if _is_present(turn, event.attempt_id):
        turn.set_attempt(done=True, entered=True)
    if turn.state.ranks == event.attempt_id:
        turn.set(ranks=None, stopping=False)


def _ranks_ended(turn: Transition, event: events.RanksEnded) -> None:
    ranks = turn.state.ranks
    if ranks is not None and ranks <= event.attempt_id:
        turn.set(ranks=None, stopping=False)


def _foreign_claims(turn: Transition, event: events.ForeignClaims) -> None:
    foreign_claims.stop_for(turn, event.claims)
    if _is_present(turn, event.attempt_id):
        incidents.close_attempt(
            turn, foreign_claims.FOREIGN
        )  # its ranks wait for their end, even if the membership lists the claims by now


def _checkpoint_requested(turn: Transition, event: events.CheckpointRequested) -> None:
    request_checkpoint(turn, event.id, event.reason)


def _drain_requested(turn: Transition, event: events.DrainRequested) -> None:
    drain.begin_drain(turn, event)


def _is_present(turn: Transition, attempt_id: AttemptId) -> bool:
    return turn.attempt is not None and turn.attempt.world.attempt_id == attempt_id


def check_invariants(before: State, after: State, actions: list[Action]) -> None:
    for name in ("accepted", "started", "trained"):
        old, new = getattr(before, name), getattr(after, name)
        if old is not None and (new is None or new < old):
            raise AssertionError(f"{name} fell from {old} to {new}")
    if before.membership and after.membership and after.membership.newness < before.membership.newness:
        raise AssertionError("the membership became older")
    if after.exit is not None and actions[-1] != after.exit:
        raise AssertionError("an action follows the exit")
    for action in actions:
        if isinstance(action, StartRanks) and after.ranks != action.world.attempt_id:
            raise AssertionError(f"ranks of {action.world.attempt_id} start while ranks of {after.ranks} run")
        if isinstance(action, Send) and isinstance(action.message, messages.Accept):
            attempt_id = action.message.world.attempt_id
            if after.accepted is None or after.accepted < attempt_id or (after.ranks or attempt_id) < attempt_id:
                raise AssertionError(f"accepted {attempt_id} while ranks of {after.ranks} are left")


_HANDLERS: Final[dict[type[Any], Callable[[Transition, Any], None]]] = {
    events.Ready: _ready,
    events.Tick: _tick,
    events.Prepared: _prepared,
    events.MembershipSeen: _membership_seen,
    events.PeerUp: peer_up,
    events.PeerDown: peer_down,
    events.Received: received,
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
    events.CheckpointRequested: _checkpoint_requested,
    events.DrainRequested: _drain_requested,
}
