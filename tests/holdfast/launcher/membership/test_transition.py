"""What one step of the state machine adds to its actions."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.attempt import AttemptId
from holdfast.launcher.membership.events import How, PeerDown, StopRanks
from holdfast.launcher.membership.peers import peer_down
from holdfast.launcher.membership.state import State
from holdfast.launcher.membership.transition import Transition

ATTEMPT = AttemptId(2, 1)
IDLE = State(me="uid-w0")
TRAINING = replace(IDLE, ranks=ATTEMPT)


def test_ranks_are_stopped_once_with_the_first_reason() -> None:
    turn = Transition(TRAINING, now=0.0)
    turn.stop_ranks("rank 1 failed")
    turn.stop_ranks("the worker leaves")
    later = Transition(turn.state, now=1.0)
    later.stop_ranks("the world ended")
    assert [*turn.actions, *later.actions] == [StopRanks(attempt_id=ATTEMPT, reason="rank 1 failed")]


def test_without_ranks_nothing_is_stopped() -> None:
    turn = Transition(IDLE, now=0.0)
    turn.stop_ranks("rank 1 failed")
    assert (turn.actions, turn.state) == ([], IDLE)


def test_peer_is_lost_since_the_first_report_of_its_loss() -> None:
    state = IDLE
    for now, how in ((5.0, How.SILENT), (8.0, How.REFUSED)):
        turn = Transition(state, now=now)
        peer_down(turn, PeerDown(pod_uid="uid-w1", how=how))
        state = turn.state
    assert (state.peers["uid-w1"].since, state.peers["uid-w1"].how) == (5.0, How.SILENT)
