"""Proposals of a world: when they are sent again, and which launcher tries again first."""

from __future__ import annotations

from dataclasses import replace

from simulation import Simulation

from holdfast.core.attempt import AttemptId
from holdfast.launcher.membership.events import Send
from holdfast.launcher.membership.formation.acceptance import consider
from holdfast.launcher.membership.formation.proposal_answers import MAX_REFUSALS, pursue, refused_by, withdraw
from holdfast.launcher.membership.messages import Propose, Refuse
from holdfast.launcher.membership.state import Proposal
from holdfast.launcher.membership.transition import Transition


def test_refused_proposer_with_a_higher_index_waits_longer() -> None:
    """Otherwise two proposers would refuse each other again and again."""
    sim = Simulation(3)
    assert sim.run(5, lambda: sim.trains_with("w0", "w1", "w2"))
    waits = []
    for name in ("w0", "w1", "w2"):
        turn = Transition(sim.pods[name].state, sim.now)
        withdraw(turn, 0.5)
        assert turn.state.proposal is None
        waits.append(round(turn.state.retry_at - sim.now, 3))
    assert waits == [0.5, 1.0, 1.5]


def test_unanswered_proposal_is_sent_again_after_the_pause() -> None:
    """Only the members that have not accepted it receive it again."""
    sim = Simulation(3)
    assert sim.run(5, lambda: sim.trains_with("w0", "w1", "w2"))
    state, resend = sim.pods["w0"].state, sim.rules.resend
    assert state.world is not None
    sent = Proposal(world=state.world, incident=None, since=sim.now, sent=sim.now, until=sim.now + 60.0)
    state = replace(state, proposal=replace(sent, accepted=frozenset({"w0", "w1"})))
    early, due = Transition(state, sim.now + 0.9 * resend), Transition(state, sim.now + resend)
    pursue(early)
    pursue(due)
    assert early.actions == []
    assert [action.to for action in due.actions if isinstance(action, Send)] == ["w2"]
    assert due.state.proposal is not None
    assert due.state.proposal.sent == due.now


def test_proposal_of_an_unknown_generation_is_refused() -> None:
    """The worker accepts it when it knows the generation."""
    sim = Simulation(3)
    assert sim.run(5, lambda: sim.trains_with("w0", "w1", "w2"))
    turn = Transition(sim.pods["w1"].state, sim.now)
    assert turn.state.world is not None
    later = replace(turn.state.world, attempt_id=AttemptId(9, 1))
    consider(turn, "w0", Propose(world=later))
    (answer,) = [action.message for action in turn.actions if isinstance(action, Send)]
    assert isinstance(answer, Refuse)
    assert answer.attempt_id == later.attempt_id
    assert turn.state.pending is None


def test_member_is_left_out_after_it_has_refused_repeatedly() -> None:
    sim = Simulation(3)
    assert sim.run(5, lambda: sim.trains_with("w0", "w1", "w2"))
    state = sim.pods["w0"].state
    assert state.world is not None
    proposal = Proposal(world=state.world, incident=None, since=sim.now, sent=sim.now, until=sim.now + 60.0)
    refusal = Refuse(attempt_id=state.world.attempt_id, reason="busy")
    muted = []
    for _ in range(MAX_REFUSALS):
        turn = Transition(replace(state, proposal=proposal), sim.now)
        refused_by(turn, "w1", refusal)
        state = turn.state
        muted.append(state.peers["w1"].muted_until > sim.now)
    assert muted == [False] * (MAX_REFUSALS - 1) + [True]
