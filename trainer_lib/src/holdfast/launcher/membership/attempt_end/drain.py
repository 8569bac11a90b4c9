"""Drains: a launcher that must leave commits first, at the time on which all ranks of its attempt agree."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.protocol import ExitCode
from holdfast.launcher.membership.attempt_end.incidents import adopt_incident, close_attempt
from holdfast.launcher.membership.attempt_end.leaving import leave
from holdfast.launcher.membership.attempt_end.root_cause import drain_failure, drain_incident, drains, root_cause
from holdfast.launcher.membership.events import DrainAsked, Exit, Note, QuiesceRanks
from holdfast.launcher.membership.messages import Failure, Hello, Incident, Notice, Priority, Remedy
from holdfast.launcher.membership.state import Attempt, Drain, Quiesce
from holdfast.launcher.membership.transition import DRAINED, Transition

_AGREED = "all ranks agreed to end the attempt"


def begin_drain(turn: Transition, event: DrainAsked) -> None:
    """This launcher must leave: an agreed commit first if there is something to lose."""
    until = event.until if event.until is not None else turn.now + turn.rules.checkpoint_deadline
    known, postponed = turn.state.drain, turn.state.postponed
    if known is not None:
        turn.set(drain=replace(known, until=min(known.until, until), node=known.node or event.node))
    elif postponed is not None and event.cause is not None:
        turn.set(postponed=replace(postponed, until=min(postponed.until, until), node=postponed.node or event.node))
    elif turn.state.leaving is None:
        _drain(turn, Drain(id=event.id, reason=event.reason, until=until, cause=event.cause, node=event.node))


def _drain(turn: Transition, drain: Drain) -> None:
    turn.set(drain=drain, postponed=None)
    attempt = turn.attempt
    if attempt is not None and _has_something_to_lose(attempt) and attempt.quiesce is None:
        turn.set_attempt(quiesce=Quiesce(id=drain.id, reason=drain.reason, until=drain.until))
        turn.do(QuiesceRanks(pair=attempt.world.pair, id=drain.id, reason=drain.reason, commit=True))


def postpone_drain(turn: Transition) -> None:
    """Another's failure ended the attempt before its agreed commit, and there is time for the next: be a member of it
    like any other, from the moment in which the failure is known, so that the others form it with us at once."""
    drain, attempt = turn.state.drain, turn.attempt
    if drain is None or attempt is None or not (attempt.failures and would_stay(turn)):
        return
    root = min(attempt.failures, key=lambda failure: failure.rank_of_root)
    me = attempt.world.member(turn.state.me)
    if root.priority is not Priority.PEER_LOST and root.pod and root.pod != me.pod:
        turn.set(drain=None, postponed=drain)
        left = drain.until - turn.now
        message = f"stays for the next attempt, at most {left:.0f} s, and commits there: {root.message}"
        turn.do(Note(phase=turn.state.phase, message=message))


def would_stay(turn: Transition) -> bool:
    """Whether a failure of the attempt puts the drain off: then the others may form the next world with us."""
    drain, attempt = turn.state.drain, turn.attempt
    if drain is None or attempt is None or drain.cause is None or turn.state.leaving is not None:
        return False
    unfinished = attempt.step is not None and attempt.quiesced_at is None and not attempt.done
    return unfinished and turn.now + turn.rules.accept_deadline <= drain.until


def hear_of_the_end(turn: Transition, incident: Incident | None) -> None:
    """A proposal may come before its sender's word that the attempt failed."""
    attempt = turn.attempt
    if turn.state.drain is not None and attempt is not None and incident and incident.pair == attempt.world.pair:
        turn.fail(incident.failure)
        postpone_drain(turn)


def heed_postponed(turn: Transition) -> None:
    """Ask the next attempt for its agreed commit once it made a step; leave if there is none for us, or no time."""
    drain, attempt = turn.state.postponed, turn.attempt
    if drain is None or turn.state.leaving is not None:
        return
    if attempt is None:
        due = _trains_without_us(turn)
    else:
        due = attempt.done or attempt.quiesced_at is not None or _has_something_to_lose(attempt)
    if due or turn.now >= drain.until:
        _drain(turn, drain)


def _trains_without_us(turn: Transition) -> bool:
    """Whether there is no next attempt to stay for: it was published, or it trains, without this worker."""
    me, membership, last = turn.state.me, turn.membership, turn.state.last
    if membership is not None and membership.member(me) is None:
        return True
    worlds = [hello.world for uid in turn.state.peers if (hello := turn.hello(uid)) and hello.world]
    return any(me not in world.uids and (last is None or world.pair > last) for world in worlds)


def _has_something_to_lose(attempt: Attempt) -> bool:
    return attempt.step is not None and not attempt.failures and attempt.quiesced_at is None and not attempt.done


def notice(turn: Transition) -> Notice | None:
    """What the other workers on this node must know: it goes as a whole."""
    drain = turn.state.drain
    if drain is None or not drain.node:
        return None
    return Notice(node=drain.node, id=drain.id, reason=drain.reason, until=drain.until)


def join_drain(turn: Transition, sender: str, hello: Hello) -> None:
    """A worker of our attempt leaves because its node goes: if it is our node too, we leave with it."""
    attempt, told = turn.attempt, hello.notice
    if attempt is None or told is None or not told.node or sender not in attempt.world.uids:
        return
    if attempt.world.member(turn.state.me).node == told.node:
        begin_drain(turn, DrainAsked(id=told.id, reason=told.reason, until=told.until, node=told.node))


def settle_quiesced(turn: Transition) -> None:
    """An agreed commit ended the attempt: the drained leave, the others wait a moment for the next proposal."""
    attempt = turn.attempt
    if attempt is None or attempt.quiesced_at is None or turn.state.pending is not None:
        return
    if drains(turn, attempt):
        drained = drain_failure(turn, attempt)
        if drained is not None:
            adopt_incident(turn, _drained(attempt, replace(drained, step=attempt.step), turn.now))
        close_attempt(turn, _AGREED)
    elif turn.now >= attempt.quiesced_at + turn.rules.accept_deadline:
        close_attempt(turn, _AGREED)


def _drained(attempt: Attempt, failure: Failure, now: float) -> Incident:
    return Incident(pair=attempt.world.pair, failure=failure, action=Remedy.SHRINK, detected=failure.at or now)


def settle_drain(turn: Transition) -> None:
    """A draining launcher leaves when its attempt is over, has nothing to lose, or the time is up."""
    drain, attempt = turn.state.drain, turn.attempt
    if drain is None or turn.state.leaving is not None:
        return
    waits = attempt is not None and (_has_something_to_lose(attempt) or attempt.done) and turn.now < drain.until
    # Who only misses a peer hears first, for the moment of the settle, whether that one failed.
    unsettled = attempt is not None and would_stay(turn) and _blind(attempt)
    if not waits and not unsettled:
        _break_off(turn)
        cause = drain.cause
        message = f"left on request: {drain.reason}"
        leave(turn, Exit(code=int(ExitCode.LEFT_ON_REQUEST), cause=cause, reason=DRAINED, message=message))


def _blind(attempt: Attempt) -> bool:
    failures = attempt.failures
    return bool(failures) and all(failure.priority is Priority.PEER_LOST for failure in failures)


def _break_off(turn: Transition) -> None:
    """No agreed commit ended the attempt in time: what was made since the last one is lost, and is counted."""
    attempt, drained = turn.attempt, drain_incident(turn)
    if attempt is None or attempt.done or drained is None:
        return
    failure = root_cause(turn, attempt) if attempt.failures else replace(drained[1], step=attempt.step)
    adopt_incident(turn, _drained(attempt, failure, turn.now))
