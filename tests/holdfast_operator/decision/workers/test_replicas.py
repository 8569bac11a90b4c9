"""Fewer workers than wanted: who goes on, who waits for whom; edits of the bounds; the scale subresource."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim import Make, Sim


def elastic(minimum: int, **more: Any) -> dict[str, Any]:
    return {"elasticity": {"minReplicas": minimum, "onFailure": "Shrink", **more}}


def full(sim: Sim, cpu: int, *, but: int = 0) -> None:
    """All nodes but so many have no more room than this: somebody else has come."""
    for name in list(sim.nodes)[but:]:
        sim.nodes[name]["status"]["allocatable"]["cpu"] = str(cpu)


def trains(sim: Sim, count: int) -> Callable[[], bool]:
    return lambda: len(sim.world_names()) == count


def test_job_starts_with_fewer_workers_if_allowed(make_sim: Make) -> None:
    sim = make_sim(replicas=3, minimum=2, nodes=1)
    sim.run(25)
    assert not sim.running(), "room for all may come in a moment"
    sim.run(90, until=trains(sim, 2))
    assert (sim.status.ready_workers, sim.status.wanted_workers) == (2, 3)
    assert len(sim.names()) == 3, "the third is asked for, and joins when there is room"
    sim.nodes["node-9"] = {**sim.nodes["node-1"], "metadata": {"name": "node-9", "labels": {}}}
    sim.leases["node-9"] = sim.now
    sim.run(60, until=trains(sim, 3))
    assert sim.status.incident_count == 0
    assert "StartedWithFewerWorkers" in [reason for reason, _ in sim.events]


@pytest.mark.parametrize(
    ("minimum", "more"), [(3, {}), (2, {"onFailure": "Replace"}), (2, {"onFailure": "Wait"}), (2, {"replicaStep": 3})]
)
def test_a_job_that_needs_all_waits_for_room_for_all(make_sim: Make, minimum: int, more: dict[str, Any]) -> None:
    sim = make_sim(replicas=3, nodes=1, **elastic(minimum, **more))
    sim.run(200)
    assert not sim.running()
    assert sim.status.summary == "WaitingForCapacity"


def test_it_waits_for_room_for_all_as_long_as_it_was_told_to(make_sim: Make) -> None:
    sim = make_sim(replicas=3, nodes=1, **elastic(2, shrinkAfterSeconds=120))
    sim.run(115)
    assert not sim.running()
    sim.run(200, until=trains(sim, 2))


def test_unbound_worker_does_not_delay_bound_ones(make_sim: Make) -> None:
    """The estimate was wrong: one of three places is taken by a stranger."""
    sim = make_sim(replicas=3, minimum=2, nodes=3)
    sim.settle()
    full(sim, 0, but=1)
    sim.run(120, until=trains(sim, 2))
    assert (sim.status.ready_workers, sim.status.wanted_workers) == (2, 3)
    assert sim.status.incident_count == 0


def test_shrunk_job_reports_why_a_ready_worker_waits(trained: Sim) -> None:
    sim = trained
    sim.saving = set(sim.names())
    sim.end("gpt-w1", 137)
    sim.run(60, until=lambda: "waiting for the end of a checkpoint" in sim.status.condition("Degraded").message)
    assert sim.status.summary == "RunningWithFewerWorkers"
    assert sim.status.condition("Degraded").message == (
        "2 of 3 workers are training; replacements are on the way;"
        " gpt-w3 is ready; waiting for the end of a checkpoint"
    )
    sim.saving.clear()
    sim.run(60, until=trains(sim, 3))


def test_launchers_are_told_how_long_to_wait_before_they_shrink(make_sim: Make) -> None:
    sim = make_sim(**elastic(2, shrinkAfterSeconds=45))
    sim.run(60, until=trains(sim, 3))
    assert sim.document["settings"]["shrinkAfterSeconds"] == 45


def test_of_two_the_survivor_waits_before_it_goes_on_alone(make_sim: Make) -> None:
    sim = make_sim(replicas=2, nodes=2, **elastic(1, shrinkAfterSeconds=60))
    sim.run(60, until=trains(sim, 2))
    full(sim, 1)
    sim.kill_node(sim.node_of("gpt-w0"))
    sim.run(50)
    assert not sim.world_names()
    sim.run(60, until=lambda: sim.world_names() == ["gpt-w1"])


def test_returned_worker_takes_its_place_with_wait(make_sim: Make) -> None:
    sim = make_sim(nodes=5, **elastic(3, onFailure="Wait"))
    sim.run(60, until=trains(sim, 3))
    node = sim.node_of("gpt-w1")
    sim.kill_node(node)
    sim.run(200)
    assert sim.created_names == ["gpt-w0", "gpt-w1", "gpt-w2"], "nobody is asked for in its place"
    assert "onFailure: Wait" in sim.status.condition("Restarting").message
    sim.heal_node(node, rebooted=False)
    sim.run(60, until=trains(sim, 3))
    assert sim.world_names() == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert sim.status.incident_count == 1
    sim.end("gpt-w0", 137)
    sim.run(90, until=lambda: sim.world_names() == ["gpt-w1", "gpt-w2", "gpt-w3"])
    assert sim.status.incident_count == 2, "each loss counts once"


def test_with_wait_a_worker_that_is_proved_gone_is_replaced(make_sim: Make) -> None:
    sim = make_sim(nodes=5, **elastic(3, onFailure="Wait"))
    sim.run(60, until=trains(sim, 3))
    node = sim.node_of("gpt-w1")
    sim.kill_node(node)
    sim.run(60)
    del sim.nodes[node]
    sim.run(90, until=lambda: sim.world_names() == ["gpt-w0", "gpt-w2", "gpt-w3"])
    sim.end("gpt-w0", 137)
    sim.run(90, until=lambda: sim.world_names() == ["gpt-w2", "gpt-w3", "gpt-w4"])


def test_with_replace_the_worlds_size_never_changes(make_sim: Make) -> None:
    sim = make_sim(nodes=5, **elastic(1, onFailure="Replace"))
    sim.run(60, until=trains(sim, 3))
    sizes = set()
    for name in ("gpt-w0", "gpt-w1"):
        sim.end(name, 137)
    for _ in range(90):
        sim.tick()
        sizes.add(len(sim.world_names()))
    assert sizes <= {0, 3}
    assert 3 in sizes


def test_a_lower_minimum_lets_a_waiting_job_go_on(make_sim: Make) -> None:
    sim = make_sim(replicas=3, minimum=3, nodes=3)
    sim.run(60, until=trains(sim, 3))
    full(sim, 1)
    sim.kill_node(sim.node_of("gpt-w1"))
    sim.run(60)
    assert not sim.world_names()
    sim.body["spec"]["elasticity"]["minReplicas"] = 2
    sim.run(60, until=trains(sim, 2))


def test_a_higher_minimum_takes_nobody_away(make_sim: Make) -> None:
    sim = make_sim(replicas=3, minimum=2, nodes=1)
    sim.run(90, until=trains(sim, 2))
    sim.body["spec"]["elasticity"]["minReplicas"] = 3
    sim.run(30)
    assert len(sim.world_names()) == 2


def test_scale_subresource_has_replicas_and_selector(trained: Sim) -> None:
    assert trained.body["status"]["replicas"] == 3
    assert trained.body["status"]["selector"] == "holdfast.dev/job-name=gpt"
    trained.body["spec"]["workers"]["replicas"] = 2
    trained.settle()
    assert trained.body["status"]["replicas"] == 2


def test_worker_off_spot_capacity_stays_when_the_job_becomes_smaller(make_sim: Make) -> None:
    """Also before a world has formed, when no worker has an index."""
    sim = make_sim(replicas=3, minimum=1)
    sim.body["spec"]["workers"]["onDemandReplicas"] = 1
    sim.tick()
    (steady,) = [worker for worker in sim.status.workers if worker.on_demand]
    sim.body["spec"]["workers"]["replicas"] = 2
    sim.run(30, until=trains(sim, 2))
    assert f"gpt-w{steady.incarnation}" in sim.world_names()


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    edits=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 15)), min_size=1, max_size=4),
    lost=st.integers(0, 4),
)
def test_whatever_is_edited_in_flight_the_job_ends_up_as_wanted(
    make_sim: Make, edits: list[tuple[int, int, int]], lost: int
) -> None:
    sim = make_sim(nodes=6)
    for number, (replicas, minimum, pause) in enumerate(edits):
        sim.body["spec"]["workers"]["replicas"] = replicas
        sim.body["spec"]["elasticity"]["minReplicas"] = min(replicas, minimum)
        for _ in range(pause):
            sim.tick(2.0)
            sim.obey_drain()
        if number == lost and sim.running():
            sim.end(sim.running()[0], 137)
    wanted = edits[-1][0]
    for _ in range(200):
        sim.tick(2.0)
        sim.obey_drain()
    assert len(sim.world_names()) == len(sim.running()) == wanted
    assert sim.status.replicas == wanted
    assert sim.status.incident_count <= 2
