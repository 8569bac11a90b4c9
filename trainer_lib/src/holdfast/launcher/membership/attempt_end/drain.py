"""Drains: a launcher that must leave first takes part in a checkpoint at a step on which all ranks agree."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.protocol import ExitCode
from holdfast.launcher.membership.attempt_end.incidents import adopt_incident, close_attempt
from holdfast.launcher.membership.attempt_end.leaving import leave
from holdfast.launcher.membership.attempt_end.root_cause import drain_failure, drain_incident, drains, root_cause
from holdfast.launcher.membership.events import DrainRequested, Exit, Note, QuiesceRanks
from holdfast.launcher.membership.messages import Failure, Hello, Incident, Notice, Priority, Remedy
from holdfast.launcher.membership.state import Attempt, Drain, Quiesce
from holdfast.launcher.membership.transition import DRAINED, Transition

_AGREED = "all ranks agreed to end the attempt"


def begin_drain(turn: Transition, event: DrainRequested) -> None:
    """Begin to drain. If steps could be lost, request an agreed checkpoint first."""
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
    if attempt is not None and _has_step_to_save(attempt) and attempt.quiesce is None:
        turn.set_attempt(quiesce=Quiesce(id=drain.id, reason=drain.reason, until=drain.until))
        turn.do(QuiesceRanks(attempt_id=attempt.world.attempt_id, id=drain.id, reason=drain.reason, commit=True))


def postpone_drain(turn: Transition) -> None:
    """Postpone the drain if another worker's failure ended the attempt before its agreed checkpoint, and time
    remains.

    From the time at which the failure is known, this launcher is an ordinary member of the next attempt. So the
    others form the next world with it at once.
    """
    drain, attempt = turn.state.drain, turn.attempt
    if drain is None or attempt is None or not (attempt.failures and could_postpone(turn)):
        return
    root = min(attempt.failures, key=lambda failure: failure.rank_of_root)
    me = attempt.world.member(turn.state.me)
    if root.priority is not Priority.PEER_LOST and root.pod and root.pod != me.pod:
        turn.set(drain=None, postponed=drain)
        left = drain.until - turn.now
        message = f"stays for the next attempt, at most {left:.0f} s, to write a checkpoint: {root.message}"
        turn.do(Note(phase=turn.state.phase, message=message))


def could_postpone(turn: Transition) -> bool:
    """Whether a failure of the attempt would postpone the drain, so that this launcher could be in the next world."""
    drain, attempt = turn.state.drain, turn.attempt
    if drain is None or attempt is None or drain.cause is None or turn.state.leaving is not None:
        return False
    unfinished = attempt.step is not None and attempt.quiesced_at is None and not attempt.done
    return unfinished and turn.now + turn.rules.accept_deadline <= drain.until


def attempt_ended_remotely(turn: Transition, incident: Incident | None) -> None:
    """Process the incident of a proposal, which may arrive before the sender's report that the attempt failed."""
    attempt = turn.attempt
    if (
        turn.state.drain is not None
        and attempt is not None
        and incident
        and incident.attempt_id == attempt.world.attempt_id
    ):
        turn.fail(incident.failure)
        postpone_drain(turn)


def resume_postponed_drain(turn: Transition) -> None:
    """Drain once the next attempt has made a step. Leave if it excludes this launcher, or the time is over."""
    drain, attempt = turn.state.postponed, turn.attempt
    if drain is None or turn.state.leaving is not None:
        return
    if attempt is None:
        due = _excluded(turn)
    else:
        due = attempt.done or attempt.quiesced_at is not None or _has_step_to_save(attempt)
    if due or turn.now >= drain.until:
        _drain(turn, drain)


def _excluded(turn: Transition) -> bool:
    """Whether a membership or a training world without this worker exists, so that it need not stay."""
    me, membership, last = turn.state.me, turn.membership, turn.state.last
    if membership is not None and membership.member(me) is None:
        return True
    worlds = [hello.world for uid in turn.state.peers if (hello := turn.hello(uid)) and hello.world]
    return any(me not in world.uids and (last is None or world.attempt_id > last) for world in worlds)


def _has_step_to_save(attempt: Attempt) -> bool:
    return attempt.step is not None and not attempt.failures and attempt.quiesced_at is None and not attempt.done


def notice(turn: Transition) -> Notice | None:
    """Return the notice for the other workers on this node, if the whole node goes away."""
    drain = turn.state.drain
    if drain is None or not drain.node:
        return None
    return Notice(node=drain.node, id=drain.id, reason=drain.reason, until=drain.until)


def join_drain(turn: Transition, sender: str, hello: Hello) -> None:
    """Drain if another worker of this attempt leaves because its node, which is also ours, goes away."""
    attempt, told = turn.attempt, hello.notice
    if attempt is None or told is None or not told.node or sender not in attempt.world.uids:
        return
    if attempt.world.member(turn.state.me).node == told.node:
        begin_drain(turn, DrainRequested(id=told.id, reason=told.reason, until=told.until, node=told.node))


def settle_quiesced(turn: Transition) -> None:
    """An agreed checkpoint ended the attempt: draining launchers leave, the others wait for the next proposal."""
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
    return Incident(
        attempt_id=attempt.world.attempt_id, failure=failure, action=Remedy.SHRINK, detected=failure.at or now
    )


def settle_drain(turn: Transition) -> None:
    """Leave when the attempt is over, no steps can be lost, or the deadline has passed."""
    drain, attempt = turn.state.drain, turn.attempt
    if drain is None or turn.state.leaving is not None:
        return
    waits = attempt is not None and (_has_step_to_save(attempt) or attempt.done) and turn.now < drain.until
    # If only lost peers are known, wait for the settle time: a report of their failure may follow.
    unsettled = attempt is not None and could_postpone(turn) and _blind(attempt)
    if not waits and not unsettled:
        _break_off(turn)
        cause = drain.cause
        message = f"left on request: {drain.reason}"
        leave(turn, Exit(code=int(ExitCode.LEFT_ON_REQUEST), cause=cause, reason=DRAINED, message=message))


def _blind(attempt: Attempt) -> bool:
    failures = attempt.failures
    return bool(failures) and all(failure.priority is Priority.PEER_LOST for failure in failures)


def _break_off(turn: Transition) -> None:
    """Record an incident: without an agreed checkpoint, the steps since the last one are lost."""
    attempt, drained = turn.attempt, drain_incident(turn)
    if attempt is None or attempt.done or drained is None:
        return
    failure = root_cause(turn, attempt) if attempt.failures else replace(drained[1], step=attempt.step)
    adopt_incident(turn, _drained(attempt, failure, turn.now))
