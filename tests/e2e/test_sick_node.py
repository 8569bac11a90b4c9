"""From a metric of a node through a real Prometheus and Alertmanager to a drained node, with training going on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.drill.faults import Drill, DrillJob, lone_worker
from holdfast_testbed.drill.promises import Promise, losses_and_causes
from holdfast_testbed.drill.sick_node import OFF_THE_BUS, monitored, remediating, unschedulable

pytestmark = pytest.mark.e2e


@pytest.fixture
def draining(cluster: Cluster) -> Iterator[None]:
    with remediating(cluster):
        yield


@pytest.mark.thorough
def test_a_metric_of_a_node_empties_it_and_no_step_is_lost(
    cluster: Cluster, draining: None, running_job: Callable[..., Any], tmp_path: Path
) -> None:
    job = running_job(spread=True)
    stage: DrillJob = job.stage
    watcher = stage.watcher
    sick = lone_worker(stage)
    with monitored(cluster, tmp_path) as source:
        begun = time.monotonic()

        def fall_off_the_bus(stage: DrillJob) -> None:
            source.xids[sick.node] = OFF_THE_BUS
            stage.say(f"a GPU of {sick.node} falls off the bus ({sick.name} runs there)")

        promise = Promise(fault="a sick GPU", within_seconds=15, max_lost_steps=0, cause="Interruption")
        outcome = Drill(name="sick node", promise=promise, inflict=fall_off_the_bus).run(stage)

        def moved() -> bool:
            now = stage.workers()
            return len(now) == 3 and all(pod.node != sick.node for pod in now) and world_of_three(stage, outcome)

        watcher.wait("three workers train, none on the sick node", moved, timeout=240)
        all_three = time.monotonic() - begun
        print(f"first step without it after {outcome.resumed_seconds:.1f} s, all three after {all_three:.1f} s")
        assert losses_and_causes(promise, outcome) == ()
        assert sum(job.counted.values()) == 1
        watcher.wait("the node is drained", lambda: "NodeDrained" in told(cluster, sick.node), timeout=240)
        assert unschedulable(cluster, sick.node)
        source.xids[sick.node] = 0
        watcher.wait("its alert is resolved", lambda: "AlertsResolved" in told(cluster, sick.node), timeout=240)
        assert unschedulable(cluster, sick.node), "a GPU that fell off the bus needs a reboot"
        machine = cluster.node(stage.node_number(sick))
        machine.kill()
        machine.start()
        watcher.wait("the node is given back", lambda: not unschedulable(cluster, sick.node), timeout=240)


def world_of_three(stage: DrillJob, outcome: Any) -> bool:
    newest = stage.watcher.newest()
    return newest is not None and newest.workers == 3 and newest.attempt_id > outcome.before


def told(cluster: Cluster, node: str) -> str:
    about = f"involvedObject.name={node}"
    return cluster.kubectl("get", "events", "--field-selector", about, "-o", "jsonpath={.items[*].reason}")
