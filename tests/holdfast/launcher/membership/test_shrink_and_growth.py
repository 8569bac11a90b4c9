"""A world shrinks when a worker is lost and grows when one joins."""

from __future__ import annotations

from simulation import Simulation

from holdfast.core.attempt import AttemptId
from holdfast.launcher.membership import events


def training(replicas: int = 3, **settings: object) -> Simulation:
    """A job whose workers are all training and have saved a checkpoint."""
    sim = Simulation(replicas, **settings)  # type: ignore[arg-type]
    names = [f"w{number}" for number in range(replicas)]
    assert sim.run(20, lambda: sim.trains_with(*names) and sim.committed() >= 2)
    return sim


def test_three_shrink_to_two_without_operator_and_grow_with_it() -> None:
    sim = training()
    sim.operator_up = False
    sim.crash("w2")
    assert sim.run(5, lambda: sim.trains_with("w0", "w1"))
    assert sim.status is not None
    assert sim.status.generation == 1

    sim.operator_up = True
    sim.prove(sim.pods["w2"])
    sim.replenish()
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w3"))
    assert sim.status.generation == 2
    assert [member.pod_uid for member in sim.status.members] == ["w0", "w1", "w3"]


def test_survivors_wait_for_a_replacement_first_if_configured() -> None:
    sim = training(shrink_after=10.0, replace_lost=False)
    sim.crash("w2")
    assert not sim.run(8, lambda: sim.trains_with("w0", "w1"))
    assert sim.run(10, lambda: sim.trains_with("w0", "w1"))
    sim.kill_rank("w1")
    before = sim.trainings[-1].world.attempt_id
    assert sim.run(6, lambda: sim.trains_with("w0", "w1") and sim.trainings[-1].world.attempt_id > before), (
        "nobody is missed"
    )


def test_a_replacement_that_comes_in_time_spares_the_shrink() -> None:
    sim = training(shrink_after=30.0)
    sim.crash("w2")
    sim.prove(sim.pods["w2"])
    sim.replenish()
    assert sim.run(25, lambda: sim.trains_with("w0", "w1", "w3"))
    assert not [t for t in sim.trainings if {member.pod_uid for member in t.world.members} == {"w0", "w1"}]


def test_the_wait_ends_though_the_lowest_index_is_the_lost_one() -> None:
    sim = training(shrink_after=5.0, replace_lost=False)
    sim.crash("w0")
    assert not sim.run(3, lambda: sim.trains_with("w1", "w2"))
    assert sim.run(10, lambda: sim.trains_with("w1", "w2"))


def test_wait_for_a_replacement_ends_despite_a_refusing_member() -> None:
    """A member that never accepts is asked again during the wait."""
    sim = training(shrink_after=10.0)
    sim.deaf = {"w2"}
    sim.kill_rank("w1")
    assert not sim.run(9, lambda: sim.trains_with("w0", "w1"))
    assert sim.run(15, lambda: sim.trains_with("w0", "w1"))


def test_growth_loses_no_step() -> None:
    sim = training()
    sim.crash("w2")
    assert sim.run(5, lambda: sim.trains_with("w0", "w1"))
    sim.prove(sim.pods["w2"])
    sim.replenish()
    before = sim.training_now()
    assert before is not None
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w3"))
    after = sim.training_now()
    assert after is not None
    assert after.base == before.steps


def test_nobody_is_taken_in_before_a_checkpoint_has_ended() -> None:
    sim = training()
    sim.crash("w2")
    assert sim.run(5, lambda: sim.trains_with("w0", "w1"))
    for uid in ("w0", "w1"):
        sim.feed(sim.pods[uid], events.Saves(saving=True))
    sim.prove(sim.pods["w2"])
    sim.replenish()
    assert not sim.run(60, lambda: not sim.trains_with("w0", "w1"))

    for uid in ("w0", "w1"):
        sim.feed(sim.pods[uid], events.Saves(saving=False))
    assert sim.run(10, lambda: sim.trains_with("w0", "w1", "w3"))


def test_growth_waits_until_all_know_the_new_generation() -> None:
    sim = training()
    sim.crash("w2")
    assert sim.run(5, lambda: sim.trains_with("w0", "w1"))
    sim.prove(sim.pods["w2"])
    sim.cut_from_operator |= {"w1"}
    sim.withheld |= {("w0", "share"), ("w3", "share")}
    sim.replenish()

    before = sim.committed()
    assert not sim.run(5, lambda: not sim.trains_with("w0", "w1"))
    assert sim.committed() > before

    sim.withheld.clear()
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w3")), "the others tell them"
    for uid in ("w0", "w1"):
        assert [i.attempt_id for i in sim.pods[uid].state.incidents] == [AttemptId(1, 1)]
