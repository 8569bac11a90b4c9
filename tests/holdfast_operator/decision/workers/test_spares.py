"""Spares stand by without a rank: first to take a lost worker's place, and nobody's loss when they are lost."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim import Make, Sim

UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}


def spares(sim: Sim) -> list[str]:
    """Pods that run and are in no world."""
    return [name for name in sim.running() if name not in sim.world_names()]


@pytest.fixture
def make_spared(make_sim: Make) -> Make:
    """A job with spares that trains, its spares ready."""

    def make(*, count: int = 1, nodes: int = 6, until: bool = True, **job: Any) -> Any:
        sim = make_sim(nodes=nodes, **job)
        sim.body["spec"]["workers"]["spares"] = count
        for node in sim.nodes.values():
            node["status"]["allocatable"]["cpu"] = "1"
        if until:
            sim.run(60, until=lambda: len(sim.world_names()) == 3 and len(spares(sim)) == count)
            sim.run(5)
        return sim

    return make


def test_spares_stand_by_and_count_as_nobody(make_spared: Make) -> None:
    sim = make_spared()
    assert (sim.world_names(), spares(sim)) == (["gpt-w0", "gpt-w1", "gpt-w2"], ["gpt-w3"])
    assert (sim.status.ready_workers, sim.status.wanted_workers, sim.status.replicas) == (3, 3, 3)
    assert "1 of 1 spares are on standby" in sim.status.condition("Ready").message
    assert sim.document["generation"] == 1
    wanted = sim.pods[sim.uid("gpt-w3")]["spec"]["affinity"]["podAntiAffinity"]
    (term,) = wanted["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname", "on nodes of their own if it can be"


def test_no_spare_is_made_before_all_workers_have_their_places(make_spared: Make) -> None:
    sim = make_spared(nodes=2, until=False, replicas=3, minimum=3)
    sim.run(40)
    assert sim.names() == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert all(body["spec"]["schedulingGates"] for body in sim.pods.values())


def test_a_spare_without_a_node_is_no_trouble(make_spared: Make) -> None:
    sim = make_spared(nodes=3, until=False)
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    sim.run(5)
    sim.pods[sim.uid("gpt-w3")]["status"]["conditions"] = [UNSCHEDULABLE]
    sim.run(120)
    assert sim.status.summary == "Training"
    assert sim.status.trouble is None
    assert not sim.status.holds("Degraded")


def test_spare_replaces_a_lost_worker_at_once(make_spared: Make) -> None:
    """The spare is replaced too."""
    sim = make_spared()
    sim.end("gpt-w1", 137)
    sim.run(5, until=lambda: sim.world_names() == ["gpt-w0", "gpt-w2", "gpt-w3"])
    assert {member["pod"]: member["index"] for member in sim.document["members"]}["gpt-w3"] == 1
    sim.run(20, until=lambda: spares(sim) == ["gpt-w4"])
    assert sim.status.incident_count == 1
    assert sim.document["generation"] == 2, "the successor of the spare gets no rank"


def test_fixed_job_waits_only_for_the_spare(make_spared: Make) -> None:
    sim = make_spared(elasticity={"onFailure": "Replace", "minReplicas": 3})
    sim.end("gpt-w1", 137)
    sim.run(5, until=lambda: sim.world_names() == ["gpt-w0", "gpt-w2", "gpt-w3"])


def test_an_interrupted_worker_hands_over_to_the_spare(make_spared: Make) -> None:
    sim = make_spared()
    sim.obeys = True
    sim.notice("gpt-w0")
    sim.run(10, until=lambda: sim.world_names() == ["gpt-w1", "gpt-w2", "gpt-w3"])
    sim.run(30, until=lambda: spares(sim) == ["gpt-w4"])
    assert [count.cause for count in sim.status.incidents_by_cause if count.cause != "Interruption"] == []


@pytest.mark.parametrize("how", ["deleted", "crashed", "gave up", "node lost", "noticed"])
def test_a_lost_spare_is_replaced_and_is_no_incident(make_spared: Make, how: str, final_exit: str) -> None:
    sim = make_spared()
    before = sim.document
    match how:
        case "deleted":
            sim.delete(sim.uid("gpt-w3"))
        case "crashed":
            sim.end("gpt-w3", 1)
        case "gave up":
            sim.end("gpt-w3", 1, message=final_exit)
        case "node lost":
            node = sim.node_of("gpt-w3")
            sim.kill_node(node)
            sim.node_unready(node)
        case "noticed":
            sim.notice("gpt-w3")
    sim.run(90, until=lambda: spares(sim) == ["gpt-w4"])
    sim.run(60)
    assert sim.status.incidents == ()
    assert sim.status.incident_count == 0
    assert (sim.document["generation"], sim.document["members"]) == (1, before["members"])
    assert sim.status.holds("Ready")


def test_a_spare_that_fails_in_a_loop_costs_the_job_nothing(make_spared: Make) -> None:
    sim = make_spared()
    start, step = sim.now, sim.step
    for _ in range(300):
        for name in spares(sim):
            sim.end(name, 1)
        sim.tick()
    assert sim.status.incident_count == 0
    assert sim.step - step >= 290, "it trains on"
    assert len(sim.created_names) <= 4 + (sim.now - start) / timedelta(seconds=20) + 1, "one now and then"


def test_a_gpu_error_of_a_spare_moves_it_and_counts_nowhere(make_spared: Make) -> None:
    rule = {"name": "bus", "action": "ReplaceNode", "onGpuErrors": {"xids": [79]}}
    sim = make_spared(recovery={"rules": [rule]})
    node, now = sim.node_of("gpt-w3"), sim.stamp()
    error = {"gpu": "GPU-1", "kind": "Xid", "xid": 79, "count": 1, "firstTime": now, "lastTime": now}
    sim.pods[sim.uid("gpt-w3")]["gpu"] = [error]
    sim.run(60, until=lambda: spares(sim) == ["gpt-w4"])
    assert sim.node_of("gpt-w4") != node
    assert sim.status.incidents == ()
    assert sim.status.incident_count == 0


def test_a_scale_down_takes_workers_and_leaves_the_spare(make_spared: Make) -> None:
    sim = make_spared(minimum=1)
    sim.obeys = True
    sim.body["spec"]["workers"]["replicas"] = 2
    sim.run(60, until=lambda: len(sim.world_names()) == 2)
    sim.run(30)
    assert (sim.world_names(), spares(sim)) == (["gpt-w0", "gpt-w1"], ["gpt-w3"])


def test_scale_down_without_the_spare_has_the_same_result(make_spared: Make) -> None:
    sim = make_spared(minimum=1)
    sim.obeys = True
    sim.delete(sim.uid("gpt-w3"))
    sim.body["spec"]["workers"]["replicas"] = 2
    sim.run(60, until=lambda: len(sim.world_names()) == 2 and len(spares(sim)) == 1)


def test_fewer_spares_take_no_worker(make_spared: Make) -> None:
    sim = make_spared(count=2)
    sim.body["spec"]["workers"]["spares"] = 0
    sim.run(30)
    assert sim.names() == sim.world_names() == ["gpt-w0", "gpt-w1", "gpt-w2"]


def test_a_suspended_job_has_no_spares_and_a_resumed_one_has(make_spared: Make) -> None:
    sim = make_spared()
    sim.obeys = True
    sim.body["spec"]["suspend"] = True
    sim.run(60, until=lambda: sim.status.holds("Suspended"))
    assert sim.running() == []
    sim.body["spec"]["suspend"] = False
    sim.run(60, until=lambda: len(sim.world_names()) == 3 and len(spares(sim)) == 1)


def test_spares_go_with_the_end_of_the_job(make_spared: Make) -> None:
    sim = make_spared()
    sim.complete_at = sim.step + 1
    sim.run(10, until=lambda: sim.status.holds("Complete"))
    sim.run(3)
    assert sim.running() == [], "nobody waits for launchers that know nothing of the end"


def test_a_growth_takes_in_no_spare_for_good(make_spared: Make) -> None:
    growth = {"minReplicas": 1, "maxReplicas": 4, "growCooldownSeconds": 10}
    sim = make_spared(elasticity=growth)
    sim.run(120, until=lambda: len(sim.world_names()) == 4 and len(spares(sim)) == 1)
    sim.run(60)
    assert len(sim.names()) == 5
    assert (sim.status.ready_workers, sim.status.wanted_workers) == (4, 3)


FAULTS = st.tuples(
    st.sampled_from(("end", "crash", "delete", "node", "notice")), st.integers(0, 5), st.integers(1, 9)
)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(faults=st.lists(FAULTS, min_size=1, max_size=4), seed=st.integers(0, 2**32))
def test_spares_are_restored_after_any_loss(make_spared: Make, faults: list[tuple[str, int, int]], seed: int) -> None:
    """Passes are interrupted at random."""
    limits = {"topologyKey": "zone", "topologyPolicy": "Packed", "nodeSharing": "Exclusive"}
    sim, dice = make_spared(recovery={"budgets": []}, nodes=10, scheduling=limits, until=False), random.Random(seed)
    sim.body["spec"]["workers"]["onDemandReplicas"] = 1
    spot = list(sim.nodes)[:6]
    for number, node in enumerate(sim.nodes):
        sim.nodes[node]["metadata"]["labels"]["zone"] = "ab"[number % 2]
    for node in spot:
        sim.nodes[node]["metadata"]["labels"]["karpenter.sh/capacity-type"] = "spot"

    def whole() -> bool:
        return len(sim.world_names()) == 3 and len(spares(sim)) == 1 and len(sim.running()) == 4

    sim.run(60, until=whole)
    for fault, pick, pause in faults:
        if sim.running():
            hurt(sim, fault, sim.running()[pick % len(sim.running())])
        for _ in range(pause):
            sim.tick(1.0, lambda: dice.choice((None, None, 0, 1, 2)))
    for node in sim.nodes:
        sim.heal_node(node, rebooted=True)
    sim.run(600, step=2.0, until=whole)
    sim.run(60, step=4.0)
    assert whole(), "and it stays so"
    homes = {name: sim.node_of(name) for name in sim.running()}
    assert len({sim.nodes[node]["metadata"]["labels"]["zone"] for node in homes.values()}) == 1
    steady = [f"gpt-w{worker.incarnation}" for worker in sim.status.workers if worker.on_demand]
    assert [homes[name] for name in steady if name in homes and homes[name] not in spot]


def hurt(sim: Sim, fault: str, name: str) -> None:
    match fault:
        case "end":
            sim.end(name, 137)
        case "crash":
            sim.end(name, 1)
        case "delete":
            sim.delete(sim.uid(name))
        case "node":
            sim.kill_node(sim.node_of(name))
        case "notice":
            sim.notice(name)
