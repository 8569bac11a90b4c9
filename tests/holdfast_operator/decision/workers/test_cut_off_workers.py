"""A worker that is cut off on a node that is heard of is replaced where the others may train."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sim import Make, Sim


def sizes(replicas: int, minimum: int, on_failure: str, **more: Any) -> dict[str, Any]:
    return {"replicas": replicas, "elasticity": {"minReplicas": minimum, "onFailure": on_failure, **more}}


def all_train(make_sim: Make, **job: Any) -> Sim:
    sim = make_sim(nodes=8, **job)
    sim.run(60, until=lambda: len(sim.world_names()) == job["replicas"])
    return sim


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(sizes(3, 2, "Shrink"), id="the others train on"),
        pytest.param(sizes(3, 3, "Shrink"), id="the others are too few"),
        pytest.param(sizes(3, 2, "Replace"), id="the others wait"),
        pytest.param(sizes(2, 1, "Shrink"), id="the operator lets the other one train on"),
        pytest.param(sizes(2, 2, "Shrink"), id="the other one is too few"),
        pytest.param(sizes(2, 1, "Replace"), id="the other one waits"),
    ],
)
def test_a_worker_that_is_cut_off_is_replaced_on_another_node(make_sim: Make, job: dict[str, Any]) -> None:
    sim = all_train(make_sim, **job)
    node, uid, count = sim.node_of("gpt-w0"), sim.uid("gpt-w0"), job["replicas"]
    sim.cut("gpt-w0")
    sim.run(55)
    assert "gpt-w0" in sim.names(), "it may come back"
    assert len(sim.created_names) == count
    sim.run(60, until=lambda: f"gpt-w{count}" in sim.world_names())
    assert len(sim.world_names()) == count
    assert sim.node_of(f"gpt-w{count}") != node
    assert ("PodUnreachable", node) in {(entry.reason, entry.node) for entry in sim.status.avoided}
    sim.run(60)
    assert uid not in sim.pods, "its kubelet has ended it"
    assert len(sim.created_names) == count + 1
    assert sim.counted == ["Infrastructure"], "its deletion is our order"
    assert sim.status.incidents[0].resumed is not None


def test_a_cut_off_worker_is_gone_only_when_its_kubelet_says_so(trained: Sim) -> None:
    uid = trained.uid("gpt-w1")
    trained.cut("gpt-w1")
    trained.lingers = timedelta(minutes=3)
    trained.run(120, until=lambda: "gpt-w3" in trained.world_names())
    assert trained.pods[uid]["metadata"]["deletionTimestamp"]
    assert uid not in trained.status.membership.gone
    trained.run(300, until=lambda: uid not in trained.pods)
    trained.run(60)
    assert trained.counted == ["Infrastructure"]


def test_a_newcomer_that_is_cut_off_is_no_further_incident(
    make_sim: Make,
) -> None:
    sim = all_train(make_sim, **sizes(3, 2, "Replace"))
    sim.end("gpt-w1", 137)
    sim.run(60, until=lambda: any(w.incarnation == 3 and w.ready_at for w in sim.status.workers))
    sim.cut("gpt-w3")
    sim.world = None
    sim.run(120, until=lambda: "gpt-w4" in sim.world_names())
    sim.run(60)
    assert sim.counted == ["Infrastructure"]


def test_an_operator_that_nobody_reaches_replaces_nobody(trained: Sim) -> None:
    trained.deaf = True
    trained.run(600)
    assert trained.created_names == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert not trained.status.incidents


def test_a_new_operator_gives_silent_workers_the_same_time(trained: Sim) -> None:
    trained.cut("gpt-w1")
    trained.run(50)
    trained.restart_operator(grace=True)
    trained.run(55)
    assert trained.created_names == ["gpt-w0", "gpt-w1", "gpt-w2"]
    trained.run(60, until=lambda: "gpt-w3" in trained.world_names())


def test_a_worker_that_only_its_sidecar_fails_trains_on(trained: Sim) -> None:
    """Its peers do not miss it: it is not lost, and to replace it would end what trains."""
    kept = trained.heard[trained.uid("gpt-w1")]
    for _ in range(200):
        trained.tick()
        trained.heard[trained.uid("gpt-w1")] = kept
        trained.settle()
    assert trained.created_names == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert len(trained.world_names()) == 3


def test_a_cut_off_majority_that_may_train_on_is_left_alone(make_sim: Make) -> None:
    sim = all_train(make_sim, **sizes(5, 2, "Shrink"))
    sim.cut("gpt-w0", "gpt-w1", "gpt-w2")
    sim.run(300)
    assert len(sim.created_names) == 5


def test_a_cut_off_majority_is_replaced_where_only_all_may_train(make_sim: Make) -> None:
    sim = all_train(make_sim, **sizes(5, 2, "Replace"))
    sim.cut("gpt-w0", "gpt-w1", "gpt-w2")
    sim.run(200, until=lambda: "gpt-w7" in sim.world_names())
    assert sim.world_names() == ["gpt-w3", "gpt-w4", "gpt-w5", "gpt-w6", "gpt-w7"]
    assert sim.counted == ["Infrastructure"], "one world ended"


def test_a_cut_off_worker_keeps_its_place_where_the_job_waits(make_sim: Make) -> None:
    sim = all_train(make_sim, **sizes(3, 3, "Wait"))
    sim.cut("gpt-w1")
    sim.run(300)
    assert sim.names() == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert "gpt-w1" in sim.plan().message, "what is waited for is said"
    sim.cut_off.clear()
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    assert sim.counted == ["Infrastructure"]
