"""The exit of a launcher, after all of its ranks have ended."""

from __future__ import annotations

from holdfast.core.protocol import ExitCode
from holdfast.launcher.membership.attempt_end.incidents import close_attempt
from holdfast.launcher.membership.events import Exit
from holdfast.launcher.membership.messages import Leaving
from holdfast.launcher.membership.transition import Transition


def leave(turn: Transition, exit_: Exit, linger: float = 0.0) -> None:
    """Exit as soon as no local rank is left and `linger` (seconds) is over."""
    if turn.state.leaving is None:
        turn.set(leaving=exit_, leave_at=turn.now + linger, proposal=None, pending=None)


def settle_leaving(turn: Transition) -> None:
    """Send the reason to the peers and exit, if it is time."""
    leaving, leave_at = turn.state.leaving, turn.state.leave_at
    if leaving is None or turn.state.exit is not None or leave_at is None:
        return
    if turn.attempt is not None and (leaving.code != ExitCode.COMPLETE):
        close_attempt(turn, leaving.message)
    turn.stop_ranks(leaving.message)
    if turn.state.ranks is None and (turn.now >= leave_at or not any(turn.up(uid) for uid in turn.state.peers)):
        turn.broadcast(Leaving(code=leaving.code))
        turn.do(leaving)
        turn.set(exit=leaving)
