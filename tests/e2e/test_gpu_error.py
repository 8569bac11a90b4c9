"""From dcgm-exporter on a node through a pod's sidecar to a worker on another node, while training goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.drill.departure import COMMITTED, Witness
from holdfast_testbed.drill.faults import Drill, DrillJob
from holdfast_testbed.drill.install import small_example
from holdfast_testbed.drill.promises import Promise, losses_and_causes
from holdfast_testbed.drill.watcher import PodView, Watcher
from holdfast_testbed.fakes.dcgm import PORT, ExporterServer, FakeGpu, FakeNode
from holdfast_testbed.node import network

pytestmark = pytest.mark.e2e

GPU = "nvidia.com/gpu"
JOB = "on-gpus"
WORKERS = 2
OFF_THE_BUS = 79

Exporters = Mapping[str, ExporterServer]


@pytest.fixture
def exporters(cluster: Cluster) -> Iterator[Exporters]:
    """A GPU on each node, and an exporter at the node's own address, where sidecars look for one by default."""
    nodes = [cluster.node(number) for number in range(1, cluster.nodes + 1)]
    with ExitStack() as stack:
        found = {}
        for node in nodes:
            serve = partial(ExporterServer, FakeNode(), address=node.plan.address, port=PORT)
            found[node.name] = stack.enter_context(network.inside(node.plan, serve))
            cluster.advertise(node.plan.number, GPU, 1)
            stack.callback(cluster.advertise, node.plan.number, GPU, 0)
        yield found


def test_gpu_off_the_bus_costs_its_worker_the_node_and_no_step(
    cluster: Cluster, namespace: str, exporters: Exporters
) -> None:
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(job_on_gpus()))
    with Watcher(cluster, namespace, JOB) as watcher:
        stage = DrillJob(cluster=cluster, watcher=watcher, say=print)
        watcher.wait("two workers", lambda: len(stage.workers()) == WORKERS, timeout=240)
        gpus = {pod.node: gpu_of(pod, namespace) for pod in stage.workers()}
        for node, gpu in gpus.items():
            exporters[node].node.gpus.append(gpu)
        watcher.wait_for_world(WORKERS, steps=5, timeout=300)
        sick = stage.workers()[1]
        watcher.wait("its GPU to be watched", lambda: watched(stage, sick), timeout=240)
        newest = watcher.newest()
        assert newest is not None
        witness = Witness(stage, sick, newest.attempt_id)

        def fall_off_the_bus(stage: DrillJob) -> None:
            stage.strike()
            gpus[sick.node].set(XID_ERRORS=OFF_THE_BUS)
            stage.say(f"a GPU of {sick.node} falls off the bus ({sick.name} runs there)")

        promise = Promise(fault="XID 79", within_seconds=30, max_lost_steps=0, cause="Infrastructure")
        outcome = Drill(name="XID 79", promise=promise, inflict=fall_off_the_bus).run(stage)

        assert losses_and_causes(promise, outcome) == ()
        seen = witness.tell(noticed=stage.struck[-1], deadline=stage.struck[-1] + 30, patience=60)
        assert (seen.result, seen.shards) == (COMMITTED, WORKERS), "a checkpoint before the worker leaves its node"
        watcher.wait_for_world(WORKERS, steps=2, timeout=240)
        assert sick.node not in {pod.node for pod in stage.workers()}, (
            "its GPU is free, and nothing else is wrong there"
        )
        assert sick.node in told(stage, "avoidedNodes[*].node")
        assert "ReplaceNodeByDefault" in told(stage, "incidents[*].decision")


@pytest.mark.thorough
def test_gpu_with_early_errors_keeps_the_gang_off_its_node(
    cluster: Cluster, namespace: str, exporters: Exporters
) -> None:
    body = job_on_gpus()
    body["spec"]["preflight"] = {"checks": ["GPU"]}
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(body))
    with Watcher(cluster, namespace, JOB) as watcher:
        stage = DrillJob(cluster=cluster, watcher=watcher, say=print)
        shown: set[str] = set()

        def placed(count: int) -> list[PodView]:
            """So many that no exporter shows yet."""
            found = [pod for pod in watcher.pods if pod.node and pod.uid and pod.name not in shown]
            return found if len(found) == count else []

        watcher.wait("two pods with nodes", lambda: bool(placed(WORKERS)), timeout=240)
        well, sick = placed(WORKERS)
        for pod in (well, sick):
            gpu = gpu_of(pod, namespace)
            if pod is sick:
                gpu.set(ECC_DBE_VOL_TOTAL=2)
            exporters[pod.node].node.gpus.append(gpu)
            shown.add(pod.name)
        watcher.wait("a pod in the sick one's place", lambda: bool(placed(1)), timeout=240)
        (other,) = placed(1)
        exporters[other.node].node.gpus.append(gpu_of(other, namespace))

        watcher.wait_for_world(WORKERS, steps=5, timeout=300)
        assert {pod.node for pod in stage.workers()} == {well.node, other.node}
        assert sick.node not in {well.node, other.node}
        assert told(stage, "avoidedNodes[*].node") == sick.node
        assert "uncorrectable memory errors" in told(stage, "avoidedNodes[*].message")
        assert watcher.view.incidents_by_cause == {}, "nothing had started"


def job_on_gpus() -> dict[str, Any]:
    """The example with two workers, each with a GPU: a node is left over."""
    body: dict[str, Any] = small_example(1_000_000)
    body["metadata"]["name"] = JOB
    body["spec"]["workers"]["replicas"] = WORKERS
    trainer = body["spec"]["workers"]["template"]["spec"]["containers"][0]
    trainer["resources"]["limits"][GPU] = 1
    return body


def gpu_of(pod: PodView, namespace: str) -> FakeGpu:
    """As the exporter maps it."""
    return FakeGpu(index=0, uuid=f"GPU-{pod.node}", pod=pod.name, namespace=namespace, pod_uid=pod.uid)


def watched(stage: DrillJob, pod: PodView) -> bool:
    """By its sidecar's own word: what is shown at first sight would be the past."""
    words = ("logs", pod.name, "-c", "holdfast-sidecar", "--tail=-1")
    said = stage.cluster.kubectl("-n", stage.watcher.namespace, *words, check=False)
    return "the GPU exporter shows 1 GPU(s) of this pod" in said


def told(stage: DrillJob, path: str) -> str:
    """A part of the job's status."""
    words = ("get", "ftj", JOB, "-o", f"jsonpath={{.status.{path}}}")
    return stage.cluster.kubectl("-n", stage.watcher.namespace, *words)
