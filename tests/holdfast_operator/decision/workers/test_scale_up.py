"""Workers beyond replicas: while there is room, one step at a time, never at anybody's cost."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim import Make, Sim


def may_grow(most: int, *, cooldown: int = 60, step: int = 1, minimum: int = 1) -> dict[str, Any]:
    return {
        "minReplicas": minimum,
        "maxReplicas": most,
        "onFailure": "Shrink",
        "growCooldownSeconds": cooldown,
        "replicaStep": step,
    }


def trains(sim: Sim, count: int) -> Callable[[], bool]:
    return lambda: len(sim.world_names()) == count


@pytest.fixture
def grown(make_sim: Make) -> Sim:
    """Two were asked for, four may be: there is room for them, and they train."""
    sim = make_sim(replicas=2, nodes=4, elasticity=may_grow(4))
    sim.run(300, until=trains(sim, 4))
    return sim


def test_a_job_grows_one_step_at_a_time_with_a_pause_between(make_sim: Make) -> None:
    sim = make_sim(replicas=2, nodes=4, elasticity=may_grow(4))
    sim.run(30, until=trains(sim, 2))
    sim.run(50)
    assert len(sim.names()) == 2
    sim.run(40, until=trains(sim, 3))
    third = sim.now
    sim.run(120, until=trains(sim, 4))
    assert (sim.now - third).total_seconds() > 40
    sim.run(300)
    assert len(sim.names()) == 4, "never beyond the most"
    assert (sim.status.ready_workers, sim.status.wanted_workers) == (4, 2)
    assert sim.status.holds("Ready")
    assert sim.status.incident_count == 0


def test_displaced_job_does_not_grow_into_the_preemptors_place(make_sim: Make) -> None:
    elastic = make_sim(name="alpha", replicas=2, nodes=4, elasticity=may_grow(4))
    urgent = make_sim(name="beta", replicas=3, minimum=3, nodes=4)
    for node in elastic.nodes.values():
        node["status"]["allocatable"]["cpu"] = "1"
    elastic.run(300, until=trains(elastic, 4))
    urgent.nodes, urgent.leases, urgent.now, urgent.priority = elastic.nodes, elastic.leases, elastic.now, 10
    elastic.peers, urgent.peers = [urgent], [elastic]
    for _ in range(400):
        urgent.tick()
        elastic.tick()
    assert (len(urgent.world_names()), len(elastic.world_names())) == (3, 1)
    assert (urgent.status.incident_count, urgent.status.gang.attempts) == (0, 0)
    assert {incident.cause for incident in elastic.status.incidents} == {"Interruption"}
    urgent.complete_at = urgent.step + 3
    for _ in range(300):
        urgent.tick()
        elastic.tick()
    assert len(elastic.world_names()) == 4


def test_it_does_not_grow_without_room_and_does_when_there_is(make_sim: Make) -> None:
    sim = make_sim(replicas=2, nodes=1, elasticity=may_grow(4))
    sim.run(200)
    assert len(sim.names()) == 2, "nothing is even asked for"
    sim.nodes["node-9"] = {**sim.nodes["node-1"], "metadata": {"name": "node-9", "labels": {}}}
    sim.leases["node-9"] = sim.now
    sim.run(60, until=trains(sim, 3))


def test_without_a_most_it_never_grows(make_sim: Make) -> None:
    sim = make_sim(replicas=2, nodes=4)
    sim.run(900, step=3.0)
    assert len(sim.names()) == 2


def test_what_finds_no_node_after_all_is_given_up_for_a_while(make_sim: Make) -> None:
    sim = make_sim(replicas=2, nodes=4, elasticity=may_grow(3, cooldown=120))
    sim.run(30, until=trains(sim, 2))
    sim.unplaceable = True
    sim.run(200, until=lambda: len(sim.names()) == 3)
    sim.run(90, until=lambda: len(sim.names()) == 2)
    given_up = sim.now
    sim.unplaceable = False
    sim.run(300, until=trains(sim, 3))
    assert (sim.now - given_up).total_seconds() > 90
    assert sim.status.incident_count == 0


def test_a_lost_worker_beyond_replicas_is_not_replaced_at_once(grown: Sim) -> None:
    grown.end(grown.running()[-1], 137)
    grown.run(40)
    assert len(grown.running()) == 3
    grown.run(200, until=trains(grown, 4))


def test_the_pause_before_a_growth_begins_anew_with_each_trouble(grown: Sim) -> None:
    grown.run(200)
    grown.end(grown.running()[-1], 137)
    grown.run(20)
    lost = grown.now
    assert len(grown.running()) == 3
    grown.run(200, until=trains(grown, 4))
    assert (grown.now - lost).total_seconds() > 30


def test_drained_worker_is_replaced_by_one_above_replicas(grown: Sim) -> None:
    grown.end("gpt-w0", 137)
    grown.run(20)
    assert len(grown.running()) == 3
    assert grown.status.holds("Ready")


def test_another_job_that_waits_gets_the_room_back(grown: Sim, make_sim: Make) -> None:
    other = make_sim(name="bert", replicas=6, minimum=6)
    other.nodes, other.leases = grown.nodes, grown.leases
    other.now = grown.now
    other.body["metadata"]["creationTimestamp"] = grown.now.isoformat()
    grown.peers, other.peers = [other], [grown]

    def tick() -> None:
        for sim in (grown, other):
            sim.tick()
            sim.obey_drain()

    for _ in range(50):
        tick()
    assert len(grown.running()) == 4, "a gang waits for a moment whenever it starts"
    for _ in range(60):
        tick()
    assert len(grown.running()) == 2
    for _ in range(40):
        tick()
    assert len(other.running()) == 6


@pytest.mark.parametrize(("minimum", "left"), [(20, 4), (6, 2)])
def test_impossible_gang_does_not_stop_growth(grown: Sim, make_sim: Make, minimum: int, left: int) -> None:
    """Not even an empty cluster could hold the gang."""
    other = make_sim(name="bert", replicas=20, minimum=minimum)
    other.nodes, other.leases, other.now = grown.nodes, grown.leases, grown.now
    other.body["metadata"]["creationTimestamp"] = grown.now.isoformat()
    grown.peers, other.peers = [other], [grown]
    grown.obeys = True
    for _ in range(120):
        other.tick()
        grown.tick()
    assert len(grown.running()) == left
    if left == 4:
        grown.end(grown.running()[-1], 137)
        for _ in range(200):
            other.tick()
            grown.tick()
        assert len(grown.world_names()) == 4, "and it grows beside it"


def test_waiting_gang_stops_growth_only_after_a_while(grown: Sim, make_sim: Make) -> None:
    other = make_sim(name="bert", replicas=6, minimum=6)
    other.nodes, other.leases = grown.nodes, grown.leases
    other.now = grown.now
    other.body["metadata"]["creationTimestamp"] = (grown.now - timedelta(days=1)).isoformat()
    grown.peers, other.peers = [other], [grown]
    other.settle()
    grown.run(50)
    assert grown.document["directives"]["drain"] == []
    grown.run(60, until=lambda: len(grown.document["directives"]["drain"]) == 2)


@pytest.mark.parametrize(("replicas", "expected"), [(1, 3), (3, 4), (4, 4)])
def test_replicas_edited_in_flight_keeps_within_the_bounds(grown: Sim, replicas: int, expected: int) -> None:
    grown.body["spec"]["workers"]["replicas"] = replicas
    for _ in range(20):
        grown.tick()
        grown.obey_drain()
    assert len(grown.running()) == expected


def test_a_lower_most_is_obeyed_at_once(grown: Sim) -> None:
    grown.body["spec"]["elasticity"]["maxReplicas"] = 3
    for _ in range(20):
        grown.tick()
        grown.obey_drain()
    assert len(grown.running()) == 3
    assert grown.status.incident_count == 0


def test_it_grows_by_whole_steps(make_sim: Make) -> None:
    sim = make_sim(replicas=2, nodes=4, elasticity=may_grow(6, cooldown=20, step=2, minimum=2))
    sizes = set()
    for _ in range(200):
        sim.tick()
        sizes.add(len(sim.world_names()))
    assert sizes == {0, 2, 4, 6}


@pytest.mark.parametrize(("most", "left"), [(4, 2), (8, 6)])
def test_lost_worker_removes_its_whole_replica_step(make_sim: Make, most: int, left: int) -> None:
    """The step is restored as a whole."""
    sim = make_sim(replicas=2, nodes=4, elasticity=may_grow(most, cooldown=60, step=2, minimum=2))
    sim.obeys = True
    sim.run(600, until=trains(sim, most))
    sim.end(sim.running()[1], 137)
    sim.run(30)
    assert (len(sim.running()), len(sim.world_names())) == (left, left), "nobody stands by without use"
    sim.run(200, until=trains(sim, most))


def test_what_finds_no_node_of_a_step_takes_the_rest_of_it_along(make_sim: Make) -> None:
    sim = make_sim(replicas=2, nodes=2, elasticity=may_grow(4, cooldown=60, step=2, minimum=2))
    sim.obeys = True
    sim.run(30, until=trains(sim, 2))
    sim.run(200, until=lambda: len(sim.names()) == 4)
    allocatable = sim.nodes["node-2"]["status"]["allocatable"]
    allocatable["cpu"] = "1"  # somebody else's pod was quicker
    sim.run(90, until=lambda: len(sim.names()) == 2)
    assert len(sim.world_names()) == 2
    allocatable["cpu"] = "2"
    sim.run(200, until=trains(sim, 4))


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    edits=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 20)), min_size=1, max_size=5),
    dice=st.randoms(use_true_random=False),
)
def test_the_target_keeps_within_its_bounds(make_sim: Make, edits: list[tuple[int, int, int]], dice: Any) -> None:
    sim = make_sim(replicas=2, nodes=3, elasticity=may_grow(4, cooldown=5))
    for replicas, more, pause in edits:
        sim.body["spec"]["workers"]["replicas"] = replicas
        sim.body["spec"]["elasticity"]["maxReplicas"] = replicas + more
        for _ in range(pause):
            sim.tick(2.0)
            sim.obey_drain()
            assert 0 <= sim.status.extra <= more
            if sim.running() and dice.random() < 0.1:
                sim.end(dice.choice(sim.running()), 137)
