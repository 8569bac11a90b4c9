"""Failures that end an attempt, and the back-off before the next one. An attempt ends once. Rules 8 and 9."""

from __future__ import annotations

from holdfast.core.limits import backoff
from holdfast.core.protocol import OUT_OF_MEMORY_RETRIED, Cause
from holdfast.launcher.membership.attempt_end.budgets import give_up_if_due, speaks
from holdfast.launcher.membership.attempt_end.incidents import adopt_incident, close_attempt
from holdfast.launcher.membership.attempt_end.root_cause import root_cause, sent_away
from holdfast.launcher.membership.messages import Failure, Incident, Priority, Remedy
from holdfast.launcher.membership.state import Attempt
from holdfast.launcher.membership.transition import Transition

MOVED_ON = "MemberMovedOn"
_REMOVED = "a worker of the attempt was asked to leave"


def settle_failures(turn: Transition) -> None:
    """End the attempt when its root cause is certain, or the settle time for other reports is over."""
    attempt = turn.attempt
    if attempt is None:
        return
    if not attempt.entered and attempt.step is None and turn.now >= attempt.since + turn.rules.startup_deadline:
        turn.fail(_not_entered(turn))
        attempt = turn.attempt or attempt
    if attempt.failed_at is None:
        return
    plain = any(failure.priority <= Priority.KILLED for failure in attempt.failures)
    if not plain and turn.now < attempt.failed_at + turn.rules.settle:
        return
    root = root_cause(turn, attempt)
    if root.priority is Priority.PEER_LOST and sent_away(turn, attempt.world):
        close_attempt(turn, _REMOVED)
    elif _overtaken(attempt, root):
        _back_off(turn, attempt, root)
        close_attempt(turn, root.message)
    else:
        _end(turn, attempt, turn.rules.restart.judged(root))


def _overtaken(attempt: Attempt, root: Failure) -> bool:
    """Whether a member accepted a higher world before this attempt made a step. This loses nothing."""
    moved_on = any(failure.reason == MOVED_ON for failure in attempt.failures)
    return moved_on and attempt.step is None and root.priority is Priority.PEER_LOST


def _not_entered(turn: Transition) -> Failure:
    return Failure(
        cause=Cause.INFRASTRUCTURE,
        reason="EntryDeadline",
        message=f"the local ranks did not enter the attempt within {turn.rules.startup_deadline:.0f} s",
        priority=Priority.DEADLINE,
        at=turn.now,
    )


def _end(turn: Transition, attempt: Attempt, root: Failure) -> None:
    attempt_id = attempt.world.attempt_id
    again = attempt.step is None and _is_same_error(turn.state.failure, root)
    turn.set(failed=attempt_id, failure=root)
    _back_off(turn, attempt, root)
    incident = Incident(attempt_id=attempt_id, failure=root, action=Remedy.WAIT, detected=root.at or turn.now)
    adopt_incident(turn, incident)
    close_attempt(turn, root.message)
    if speaks(turn, attempt):
        give_up_if_due(turn, incident, again=again)


def _is_same_error(before: Failure | None, root: Failure) -> bool:
    return before is not None and bool(root.mistake) and before.mistake == root.mistake


def _back_off(turn: Transition, attempt: Attempt, root: Failure) -> None:
    if root.reason == OUT_OF_MEMORY_RETRIED:  # each try needs less memory, and their number is small
        return
    fruitless = turn.state.fruitless + 1 if attempt.step is None else 0
    blamed = root.cause in (Cause.APPLICATION, Cause.OOM)
    doublings = fruitless if blamed else fruitless - 1
    pause = backoff(doublings, first=turn.rules.backoff_initial, longest=turn.rules.backoff_max)
    turn.set(fruitless=fruitless, not_before=turn.now + (pause if blamed or fruitless else 0.0))
