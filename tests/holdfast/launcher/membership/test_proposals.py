"""Proposals of a world: which launcher tries again first."""

from __future__ import annotations

from simulation import Simulation

from holdfast.launcher.membership.formation.proposal_answers import withdraw
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
