"""Replicas that differed: counted once, shown for a day, and held against a node after repeats."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from failing_jobs import told, training
from sim import Make, Sim

from holdfast_operator.api import names as c
from holdfast_operator.api.status import ConditionType
from holdfast_operator.api.times import format_time


def diverge(sim: Sim, name: str, count: int, *, step: int | None = None, repaired: bool = True) -> None:
    """A launcher reports this number of divergences since its start, each after another step."""
    last: dict[str, Any] = {"rank": 1, "step": step or 40 * count, "tensor": "model/weight", "repaired": repaired}
    sim.divergences[name] = {"count": count, "last": {**last, "time": format_time(sim.now)} if count else None}


def run(sim: Sim, seconds: float = 10) -> list[tuple[int, bool]]:
    """Let time pass, and return the divergences that the plans count in the metrics: ranks, and if repaired."""
    counted: list[tuple[int, bool]] = []
    apply = sim.apply

    def recorded(plan: Any, actions: int | None = None) -> bool:
        counted.extend((one.ranks, one.repaired) for one in plan.diverged)
        return apply(plan, actions)

    sim.apply = recorded  # type: ignore[method-assign]
    sim.run(seconds)
    sim.apply = apply  # type: ignore[method-assign]
    return counted


def test_a_job_whose_replicas_are_equal_has_neither_record_nor_condition(make_sim: Make) -> None:
    sim = training(make_sim)
    assert sim.status.divergences is None
    assert sim.status.condition(ConditionType.REPLICAS_DIVERGED) is None


def test_a_divergence_is_counted_once_and_names_rank_node_and_step(make_sim: Make) -> None:
    sim = training(make_sim)
    node = sim.node_of("gpt-w1")
    diverge(sim, "gpt-w1", 1)
    assert run(sim) == [(1, True)]
    sim.restart_operator()
    assert run(sim) == []
    shown = sim.body["status"]["divergences"]
    shown["last"].pop("time")
    assert shown == {
        "count": 1,
        "last": {"rank": 1, "node": node, "step": 40, "tensor": "model/weight", "repaired": True},
    }
    condition = sim.status.condition(ConditionType.REPLICAS_DIVERGED)
    assert condition is not None
    assert (condition.status, condition.reason) == (True, "ReplicaRepaired")
    assert told(sim, "ReplicaRepaired") == [condition.message]
    assert f"rank 1 on node {node}" in condition.message
    assert not sim.status.avoided
    assert sim.status.summary == "Training"


def test_the_condition_is_false_after_a_day(make_sim: Make) -> None:
    sim = training(make_sim)
    diverge(sim, "gpt-w1", 1)
    sim.run(10)
    sim.now += c.DIVERGENCE_WINDOW
    sim.leases = dict.fromkeys(sim.nodes, sim.now)
    sim.restart_operator(grace=True)
    sim.run(20)
    condition = sim.status.condition(ConditionType.REPLICAS_DIVERGED)
    assert condition is not None
    assert (condition.status, condition.reason) == (False, "NoRecentDivergence")
    assert sim.status.divergences is not None


def test_a_restarted_launcher_counts_from_zero(make_sim: Make) -> None:
    sim = training(make_sim)
    for count in (1, 0, 1):
        diverge(sim, "gpt-w1", count)
        sim.run(10)
    assert sim.status.divergences is not None
    assert sim.status.divergences.count == 2


def test_each_rank_counts_but_the_ranks_of_one_comparison_count_once_against_the_node(make_sim: Make) -> None:
    sim = training(make_sim)
    for count, new in ((1, 1), (3, 2)):
        diverge(sim, "gpt-w1", count, step=40)
        assert run(sim) == [(new, True)]
    assert sim.status.divergences is not None
    assert sim.status.divergences.count == 3
    assert not sim.status.avoided
    diverge(sim, "gpt-w1", 4, step=80)
    sim.run(10)
    assert "2 times within 24 h" in told(sim, "RepeatedDivergence")[0]


def test_a_node_that_is_avoided_is_not_announced_again(make_sim: Make) -> None:
    sim = training(make_sim)
    for count in (1, 2, 3):
        diverge(sim, "gpt-w1", count)
        sim.run(10)
    assert len(told(sim, "RepeatedDivergence")) == 1


def test_a_boot_that_was_unknown_clears_no_record(make_sim: Make) -> None:
    sim = training(make_sim)
    node = sim.node_of("gpt-w1")
    boot_id = sim.nodes[node]["status"]["nodeInfo"].pop("bootID")
    diverge(sim, "gpt-w1", 1)
    sim.run(10)
    sim.nodes[node]["status"]["nodeInfo"]["bootID"] = boot_id
    diverge(sim, "gpt-w1", 2)
    sim.run(10)
    assert [entry.node for entry in sim.status.avoided] == [node]


def test_the_second_divergence_on_a_node_within_a_day_avoids_the_node(make_sim: Make) -> None:
    sim = training(make_sim)
    node = sim.node_of("gpt-w1")
    for name, count in (("gpt-w1", 1), ("gpt-w0", 1), ("gpt-w1", 2)):
        diverge(sim, name, count)
        sim.run(10)
        assert bool(sim.status.avoided) is (count == 2)
    (entry,) = sim.status.avoided
    assert (entry.node, entry.reason) == (node, "RepeatedDivergence")
    assert timedelta(hours=23) < entry.until - sim.now <= timedelta(hours=24)
    assert "2 times within 24 h; the job places no new worker there" in told(sim, "RepeatedDivergence")[0]


def test_divergences_further_apart_than_a_day_avoid_no_node(make_sim: Make) -> None:
    sim = training(make_sim)
    for count in (1, 2):
        diverge(sim, "gpt-w1", count)
        sim.run(10)
        sim.now += c.DIVERGENCE_WINDOW
        sim.leases = dict.fromkeys(sim.nodes, sim.now)
        sim.restart_operator(grace=True)
        sim.run(20)
    assert not sim.status.avoided


def test_a_reboot_clears_the_node(make_sim: Make) -> None:
    sim = training(make_sim)
    node = sim.node_of("gpt-w1")
    diverge(sim, "gpt-w1", 1)
    sim.run(10)
    sim.nodes[node]["status"]["nodeInfo"]["bootID"] += "x"
    diverge(sim, "gpt-w1", 2)
    sim.run(10)
    assert not sim.status.avoided


def test_a_node_without_an_alternative_is_still_used(make_sim: Make) -> None:
    sim = make_sim(replicas=2, minimum=1, nodes=1)
    sim.obeys = True
    sim.run(60, until=lambda: sim.status.summary == "Training")
    for count in (1, 2):
        diverge(sim, "gpt-w1", count)
        sim.run(10)
    assert not sim.status.avoided
    assert "the job still uses the node" in told(sim, "RepeatedDivergence")[0]


def test_without_a_majority_no_node_is_blamed(make_sim: Make) -> None:
    sim = training(make_sim)
    for count in (1, 2):
        diverge(sim, "gpt-w1", count, repaired=False)
        assert run(sim) == [(1, False)]
    assert sim.status.divergences is not None
    assert sim.status.divergences.last.node == ""
    assert not sim.status.avoided
    condition = sim.status.condition(ConditionType.REPLICAS_DIVERGED)
    assert condition is not None
    assert condition.reason == "NoMajorityOfReplicas"
