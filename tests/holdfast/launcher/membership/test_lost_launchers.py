"""Launchers, the coordinator or the operator are lost, or the network is partitioned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulation import Simulation

from holdfast.launcher.membership.state import Phase
from holdfast_operator.api.reasons import MembershipReason
from holdfast_operator.decision.membership.candidates import Wait


def training(replicas: int = 3, **settings: object) -> Simulation:
    """A job whose workers are all training and have saved a checkpoint."""
    sim = Simulation(replicas, **settings)  # type: ignore[arg-type]
    names = [f"w{number}" for number in range(replicas)]
    assert sim.run(20, lambda: sim.trains_with(*names) and sim.committed() >= 2)
    return sim


def test_with_one_of_two_pods_lost_the_operator_decides() -> None:
    """The survivor waits until the operator publishes a generation with it alone."""
    sim = training(2, replace_lost=False)
    sim.operator_up = False
    sim.crash("w1")
    assert not sim.run(5, lambda: sim.training_now() is not None)
    assert sim.pods["w0"].state.phase is Phase.WAITING
    sim.operator_up = True
    assert sim.run(10, lambda: sim.trains_with("w0"))
    assert sim.status is not None
    assert sim.status.generation == 2


def test_of_two_pods_the_survivor_takes_the_replacement() -> None:
    sim = training(2, may_shrink=False)
    sim.crash("w1")
    sim.prove(sim.pods["w1"])
    sim.replenish()
    assert sim.run(20, lambda: sim.trains_with("w0", "w2"))


def test_one_pod_is_replaced_only_when_it_is_proved_gone() -> None:
    sim = training(1)
    sim.freeze("w0")
    sim.run(5)
    sim.replenish()
    assert not sim.run(10, lambda: sim.trains_with("w1"))
    assert isinstance(sim.verdict, Wait)
    assert sim.verdict.reason is MembershipReason.AWAITING_FENCE
    assert "w0" in sim.verdict.message

    sim.crash("w0")
    sim.prove(sim.pods["w0"])
    assert sim.run(10, lambda: sim.trains_with("w1"))


def test_the_coordinator_is_lost_while_the_operator_is_away() -> None:
    sim = training()
    sim.operator_up = False
    sim.crash("w0")
    assert sim.run(5, lambda: sim.trains_with("w1", "w2"))
    assert sim.training_now().world.coordinator == "w1"  # type: ignore[union-attr]


@pytest.mark.parametrize("operator_side", ["majority", "minority"])
def test_a_partition_lets_only_the_majority_train_and_heals(operator_side: str) -> None:
    sim = training(replace_lost=False)
    sim.cut(["w0"], ["w1", "w2"])
    sim.cut_from_operator |= {"w0"} if operator_side == "majority" else {"w1", "w2"}
    assert sim.run(8, lambda: sim.trains_with("w1", "w2"))
    assert sim.pods["w0"].state.world is None

    sim.heal()
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w2"))


def test_partition_with_operator_on_the_minority_awaits_a_fence() -> None:
    """The replacements are on the minority side."""
    sim = training()
    sim.cut(["w0"], ["w1", "w2"])
    sim.cut_from_operator |= {"w1", "w2"}
    sim.run(6)
    sim.replenish()
    sim.cut(["w3", "w4"], ["w1", "w2"])
    sim.run(10)
    assert sim.trains_with("w1", "w2")
    assert isinstance(sim.verdict, Wait)
    assert sim.verdict.reason is MembershipReason.AWAITING_FENCE

    sim.heal()
    assert sim.run(30, lambda: sim.trains_with("w0", "w1", "w2"))


def test_member_that_never_accepts_is_left_out_until_it_recovers() -> None:
    sim = training()
    sim.deaf = {"w2"}
    sim.kill_rank("w1")
    assert sim.run(15, lambda: sim.trains_with("w0", "w1"))
    sim.deaf = set()
    assert sim.run(30, lambda: sim.trains_with("w0", "w1", "w2"))


def test_refusing_member_is_left_out_until_it_recovers() -> None:
    sim = training()
    sim.operator_up = False
    stubborn = sim.pods["w2"]
    stubborn.state = replace(stubborn.state, conflict=1)
    sim.kill_rank("w1")
    assert sim.run(15, lambda: sim.trains_with("w0", "w1"))
    stubborn.state = replace(stubborn.state, conflict=None)
    assert sim.run(30, lambda: sim.trains_with("w0", "w1", "w2"))


def test_after_all_pods_crash_the_newest_checkpoint_is_resumed() -> None:
    sim = training()
    committed = sim.committed()
    for uid in ("w0", "w1", "w2"):
        sim.crash(uid)
    for uid in ("w0", "w1", "w2"):
        sim.prove(sim.pods[uid])
    sim.replenish()
    assert sim.run(20, lambda: sim.trains_with("w3", "w4", "w5"))
    assert sim.training_now().restored >= committed  # type: ignore[union-attr]


def test_the_operator_comes_back_after_all_crashed() -> None:
    sim = training()
    sim.operator_up = False
    for uid in ("w0", "w1", "w2"):
        sim.crash(uid)
    sim.run(10)
    sim.operator_up = True
    for uid in ("w0", "w1", "w2"):
        sim.prove(sim.pods[uid])
    sim.replenish()
    assert sim.run(20, lambda: sim.trains_with("w3", "w4", "w5"))


def test_an_operator_that_comes_after_the_pods_publishes_them() -> None:
    sim = Simulation(operator=False)
    assert not sim.run(10, lambda: sim.training_now() is not None)
    assert {pod.state.phase for pod in sim.alive()} == {Phase.WAITING}
    sim.operator_up = True
    assert sim.run(10, lambda: sim.trains_with("w0", "w1", "w2"))
