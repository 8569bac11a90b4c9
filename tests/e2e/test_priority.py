"""A job of a higher priority takes the nodes of one that trains, which loses no step and comes back after it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.drill.install import small_example
from holdfast_testbed.drill.watcher import Watcher

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

URGENT = "urgent"
ENDLESS_STEPS = 1_000_000


@pytest.fixture
def priority_class(cluster: Cluster) -> Iterator[str]:
    """One above all that have none."""
    body = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": URGENT},
        "value": 1000,
    }
    cluster.kubectl("apply", "-f", "-", input=json.dumps(body))
    yield URGENT
    cluster.kubectl("delete", "priorityclass", URGENT)


def test_higher_priority_displaces_a_job_that_returns_afterwards(
    cluster: Cluster, namespace: str, priority_class: str
) -> None:
    nodes = json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]
    cores = min(int(node["status"]["allocatable"]["cpu"]) for node in nodes)
    share = f"{cores * 600}m"  # more than half of a node: one worker a node

    job = _job("patient", share, replicas=3, steps=ENDLESS_STEPS)
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=job)
    with Watcher(cluster, namespace, "patient") as patient, Watcher(cluster, namespace, URGENT) as urgent:
        patient.wait_for_world(3, steps=5, timeout=300)
        job = _job(URGENT, share, replicas=2, steps=10, priority=priority_class)
        cluster.kubectl("-n", namespace, "apply", "-f", "-", input=job)
        urgent.wait("the urgent job to finish", lambda: urgent.view.is_true("Complete"), timeout=300)
        patient.wait_for_step(_step(patient) + 5, timeout=300)
        patient.wait("the end of what was told of it", lambda: _resumed(patient), timeout=60)

        assert urgent.view.incidents_by_cause == {}
        assert set(patient.view.incidents_by_cause) == {"Interruption"}, patient.view.incidents
        told = patient.view.incidents
        assert [incident.lost_steps for incident in told] == [0] * len(told), told
        reasons = cluster.kubectl("-n", namespace, "get", "events", "-o", "jsonpath={.items[*].reason}").split()
        assert "PreemptionByScheduler" in reasons
        assert "GangTimeout" not in reasons


def _step(watcher: Watcher) -> int:
    newest = watcher.newest()
    return newest.step if newest is not None else 0


def _resumed(watcher: Watcher) -> bool:
    return all(incident.resumed is not None for incident in watcher.view.incidents)


def _job(name: str, cpu: str, *, replicas: int, steps: int, priority: str = "") -> str:
    job = small_example(steps)
    job["metadata"]["name"] = name
    job["spec"]["workers"]["replicas"] = replicas
    pod_spec = job["spec"]["workers"]["template"]["spec"]
    if priority:
        pod_spec["priorityClassName"] = priority
    trainer = pod_spec["containers"][0]
    trainer["command"].insert(2, "--warm-processes=none")
    trainer["resources"]["requests"]["cpu"] = cpu
    return json.dumps(job)
