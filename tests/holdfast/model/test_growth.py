"""Workers join, and messages reach each launcher in a different order. No launcher fails because of that."""

from __future__ import annotations

import random

import pytest
from simulation import Simulation

from holdfast.core.attempt import AttemptId

TURNS = 30_000


def disorder(sim: Simulation, dice: random.Random) -> None:
    """Run one random transition. Only messages between the same two launchers keep their order."""
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


def play(sim: Simulation, dice: random.Random) -> None:
    """Run until a world of three trains in a later generation."""
    for turn in range(TURNS):
        if turn % 500 == 0:
            sim.replenish()
        world = sim.trainings[-1].world
        if len(world.members) == 3 and world.attempt_id.generation > 1 and sim.trains_with(*world.uids):
            return
        disorder(sim, dice)
    raise AssertionError("it never trains with three again")


@pytest.mark.parametrize("seed", [11, *range(30, 50)])
def test_world_superseded_before_its_first_step_is_no_failure(seed: int) -> None:
    sim, dice = Simulation(), random.Random(seed)
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w2") and sim.committed() >= 2)
    sim.crash("w2")
    assert sim.run(5, lambda: sim.trains_with("w0", "w1"))
    sim.crash("w1")
    for uid in ("w1", "w2"):
        sim.prove(sim.pods[uid])
    play(sim, dice)
    counted = {incident.attempt_id for pod in sim.alive() for incident in pod.state.incidents}
    assert counted == {AttemptId(1, 1), AttemptId(1, 2)}


@pytest.mark.parametrize("lost", ["w0", "w2"])
@pytest.mark.parametrize("seed", range(25))
def test_joining_worker_costs_no_incident_in_any_order(lost: str, seed: int) -> None:
    """The other workers receive the new generation in any order."""
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
        before = {incident.attempt_id for incident in known[uid]}
        assert [i for i in sim.pods[uid].state.incidents if i.attempt_id not in before] == []
