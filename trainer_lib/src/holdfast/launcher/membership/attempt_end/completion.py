"""Completion of the job.

Invariant: only the coordinator announces `complete`, after every member has confirmed that it is done and still in
the attempt.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.attempt import AttemptId
from holdfast.core.protocol import ExitCode
from holdfast.launcher.membership.attempt_end.leaving import leave
from holdfast.launcher.membership.events import Exit, How
from holdfast.launcher.membership.messages import Complete, Confirm, Confirmed
from holdfast.launcher.membership.state import Attempt
from holdfast.launcher.membership.transition import Transition

LINGER = 2.0


def complete(turn: Transition) -> None:
    """Coordinator: when all members are done, ask all of them once more, and announce completion only then."""
    attempt = turn.attempt
    if attempt is None or attempt.world.coordinator != turn.state.me or turn.state.leaving is not None:
        return
    if not attempt.done or not all(_done(turn, attempt, uid) for uid in attempt.world.uids - {turn.state.me}):
        return
    if turn.state.confirmed is None:
        turn.set(confirmed=attempt.world.attempt_id)
    waiting = attempt.world.uids - turn.state.confirmations - {turn.state.me}
    if not waiting:
        _announce(turn, attempt)
    elif turn.now >= turn.state.confirm_sent + turn.rules.resend:
        turn.set(confirm_sent=turn.now)
        for uid in sorted(waiting):
            turn.send(uid, Confirm(attempt_id=attempt.world.attempt_id))


def _done(turn: Transition, attempt: Attempt, uid: str) -> bool:
    hello = turn.hello(uid)
    return (
        hello is not None
        and hello.done
        and hello.world is not None
        and hello.world.attempt_id == attempt.world.attempt_id
    )


def _announce(turn: Transition, attempt: Attempt) -> None:
    attempt_id = attempt.world.attempt_id
    turn.set(complete=attempt_id)
    turn.broadcast(Complete(attempt_id=attempt_id))
    leave(turn, _completed(), linger=LINGER)


def _completed() -> Exit:
    return Exit(code=int(ExitCode.COMPLETE), reason="Complete", message="the job is complete", final=True)


def confirm(turn: Transition, sender: str, attempt_id: AttemptId) -> None:
    """Member: confirm if this launcher is done, still in the attempt, and not leaving it."""
    attempt = turn.attempt
    if attempt is None or attempt.world.attempt_id != attempt_id or attempt.world.coordinator != sender:
        return
    if attempt.done and not attempt.failures and turn.state.pending is None and turn.state.accepted == attempt_id:
        turn.set(confirmed=attempt_id)
        turn.send(sender, Confirmed(attempt_id=attempt_id))


def confirmed_by(turn: Transition, sender: str, attempt_id: AttemptId) -> None:
    """Coordinator: record that a member confirmed."""
    if turn.attempt is not None and turn.attempt.world.attempt_id == attempt_id and sender in turn.attempt.world.uids:
        turn.set(confirmations=turn.state.confirmations | {sender})


def completed(turn: Transition, attempt_id: AttemptId) -> None:
    """The coordinator announced that the job is complete."""
    turn.set(complete=attempt_id)
    leave(turn, _completed())


def left(turn: Transition, sender: str, code: int) -> None:
    """A peer sent `Leaving`. Its channel counts as closed."""
    peer = turn.state.peers.get(sender)
    if peer is None:
        return
    if code == ExitCode.COMPLETE and turn.attempt is not None and sender in turn.attempt.world.uids:
        completed(turn, turn.attempt.world.attempt_id)
    turn.set_peer(sender, replace(peer, up=False, since=turn.now, how=How.LEFT))
