"""A worker joins while others train, and news reach each launcher in an order of their own: nobody fails by that."""

from __future__ import annotations

import random

import pytest
from simulation import Simulation

TURNS = 30_000


def disorder(sim: Simulation, dice: random.Random) -> None:
    """One thing happens somewhere. What one launcher says to another arrives in order, and that is all."""
    pod = dice.choice(sim.alive())
    turns = {
        sim.tick: 3,
        sim.decide: 5,
        lambda: sim.serve(pod): 7,
        lambda: sim.report(pod): 10,
        lambda: sim.look(pod): 15,
        lambda: sim.shell(pod): 15,
        lambda: train(sim): 15,
        lambda: deliver_one(sim, dice): 30,
    }
    dice.choices(list(turns), list(turns.values()))[0]()


def train(sim: Simulation) -> None:
    for training in sim.trainings:
        if training.alive:
            sim.train(training)


def deliver_one(sim: Simulation, dice: random.Random) -> None:
    if sim.mail:
        chosen = dice.choice(sim.mail)
        links = [(letter.sender, letter.to) for letter in sim.mail]
        sim.deliver(links.index((chosen.sender, chosen.to)))


@pytest.mark.parametrize("lost", ["w0", "w2"])
@pytest.mark.parametrize("seed", range(25))
def test_a_worker_that_joins_costs_no_incident_in_whatever_order_the_others_hear_of_it(lost: str, seed: int) -> None:
    sim, dice = Simulation(), random.Random(seed)
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w2") and sim.committed() >= 2)
    left = sorted({"w0", "w1", "w2"} - {lost})
    sim.crash(lost)
    assert sim.run(5, lambda: sim.trains_with(*left))
    known = {uid: sim.pods[uid].state.incidents for uid in left}
    sim.prove(sim.pods[lost])
    sim.replenish()

    for _ in range(TURNS):
        if sim.trains_with(*left, "w3"):
            break
        disorder(sim, dice)

    assert sim.trains_with(*left, "w3")
    for uid in left:
        before = {incident.pair for incident in known[uid]}
        assert [i for i in sim.pods[uid].state.incidents if i.pair not in before] == []
