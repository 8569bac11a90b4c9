"""Two jobs that do not fit together: neither holds the other up half-placed."""

from __future__ import annotations

import json

import pytest

from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.drill.install import small_example
from holdfast_testbed.drill.watcher import Watcher

pytestmark = pytest.mark.e2e


@pytest.mark.thorough
def test_two_gangs_of_two_thirds_of_the_cluster_both_finish(cluster: Cluster, namespace: str) -> None:
    nodes = json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]
    cores = min(int(node["status"]["allocatable"]["cpu"]) for node in nodes)
    share = f"{cores * 600}m"  # more than half of a node: one worker a node, two nodes a job, four wanted of three
    manifests = [_gang(name, share) for name in ("first", "second")]

    cluster.kubectl("-n", namespace, "apply", "-f", "-", input="\n---\n".join(manifests))

    with Watcher(cluster, namespace, "first") as first, Watcher(cluster, namespace, "second") as second:
        for watcher in (first, second):
            watcher.wait(f"{watcher.job} to finish", lambda w=watcher: w.view.is_true("Complete"), timeout=300)
            assert watcher.view.incidents_by_cause == {}

    told = cluster.kubectl(
        "-n", namespace, "logs", "-l", "holdfast.dev/job-name=first", "-c", "holdfast-sidecar", "--tail=-1"
    )
    for check in ("Storage", "Network", "Clock"):
        assert told.count(f"preflight: {check}: Passed") == 2, told
    assert told.count("preflight: GPU: Skipped") == 2, told


def _gang(name: str, cpu: str) -> str:
    job = small_example(10)
    job["metadata"]["name"] = name
    job["spec"]["workers"]["replicas"] = 2
    job["spec"]["preflight"] = {}
    trainer = job["spec"]["workers"]["template"]["spec"]["containers"][0]
    trainer["command"].insert(2, "--warm-processes=none")
    trainer["resources"]["requests"]["cpu"] = cpu
    return json.dumps(job)
