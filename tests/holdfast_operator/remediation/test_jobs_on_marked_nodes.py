"""What a job does when remediation takes its node out of service: one agreed commit, and a replacement at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from sim import Make, Sim

from holdfast_operator.api.node_mark import Mark, Mode
from holdfast_operator.cluster.cache import Cache

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
DRAIN = Mark(mode=Mode.DRAIN, message="alert Hot", since=NOW, alerts=("a",), draining_since=NOW)


def mark(sim: Sim, node: str, made: Mark = DRAIN) -> None:
    sim.nodes[node]["metadata"]["annotations"] = {"holdfast.dev/remediation": made.to_json()}
    sim.nodes[node]["spec"]["unschedulable"] = True


def trains_with(sim: Sim, *names: str) -> Callable[[], bool]:
    return lambda: sim.world_names() == sorted(names)


def test_worker_on_a_marked_node_is_drained_and_replaced(trained: Sim) -> None:
    """Both happen at once, and it counts as an Interruption."""
    node = trained.node_of("gpt-w1")
    mark(trained, node)
    trained.tick(0.5)
    assert trained.document["directives"]["drain"] == ["uid-gpt-w1"]
    assert "gpt-w3" in trained.names(), "in the same pass"
    assert trained.running() == ["gpt-w0", "gpt-w1", "gpt-w2"], "it is still there to commit"
    trained.run(60, until=trains_with(trained, "gpt-w0", "gpt-w2", "gpt-w3"))
    assert trained.node_of("gpt-w3") != node
    trained.run(30, until=lambda: bool(trained.counted))
    assert trained.counted == ["Interruption"]
    assert any(reason == "NodeRemediation" and "alert Hot" in words for reason, words in trained.events)


@pytest.mark.parametrize("mode", [Mode.CORDON, Mode.DRAIN, Mode.REPLACE])
def test_a_job_that_opted_out_stays(make_sim: Make, mode: Mode) -> None:
    sim = make_sim(nodeRemediation={"policy": "Ignore"})
    sim.run(60, until=trains_with(sim, "gpt-w0", "gpt-w1", "gpt-w2"))
    mark(sim, sim.node_of("gpt-w1"), replace(DRAIN, mode=mode))
    sim.run(120)
    assert sim.world_names() == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert sim.document["directives"]["drain"] == []


@pytest.mark.parametrize("change", [{"overruled": True}, {"clear_since": NOW}])
def test_a_mark_that_drains_no_more_moves_nobody(trained: Sim, change: dict[str, Any]) -> None:
    node = trained.node_of("gpt-w1")
    mark(trained, node, replace(DRAIN, **change))
    trained.nodes[node]["spec"]["unschedulable"] = False
    trained.run(30)
    assert trained.world_names() == ["gpt-w0", "gpt-w1", "gpt-w2"]


def test_a_mark_wakes_the_jobs_of_its_node() -> None:
    cache = Cache()
    node: dict[str, Any] = {"metadata": {"name": "n0", "resourceVersion": "1"}, "spec": {}, "status": {}}
    assert cache.put_node(node)
    same = {**node, "metadata": {**node["metadata"], "resourceVersion": "2"}}
    assert not cache.put_node(same)
    annotations = {"holdfast.dev/remediation": DRAIN.to_json()}
    assert cache.put_node({**same, "metadata": {**same["metadata"], "annotations": annotations}})
