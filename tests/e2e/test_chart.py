"""The chart by the real Helm CLI: upgraded and uninstalled under a running job, which does not notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.constants import OPERATOR_NAMESPACE
from holdfast_testbed.drill.install import install_chart, uninstall_chart
from holdfast_testbed.waiting import wait_for

pytestmark = pytest.mark.e2e


def test_helm_test_runs_a_small_job_and_leaves_nothing(cluster: Cluster) -> None:
    told = cluster.helm("test", "holdfast", "--namespace", OPERATOR_NAMESPACE, "--timeout", "180s")
    assert "Succeeded" in told

    def left() -> str:
        return cluster.kubectl("-n", OPERATOR_NAMESPACE, "get", "ftj,pods,serviceaccounts,roles", "-o", "name")

    wait_for(lambda: "test" not in left(), what="nothing of it is left", seconds=240, every=0.5, explain=left)


def test_upgrade_and_uninstall_leave_the_jobs_pods_alone(cluster: Cluster, running_job: Callable[..., Any]) -> None:
    watcher = running_job().watcher
    pods = {pod.uid for pod in watcher.pods}
    world = watcher.newest()
    assert world is not None
    try:
        install_chart(cluster, "logLevel=DEBUG")
        watcher.wait_for_step(world.step + 5, timeout=240)
        uninstall_chart(cluster)
        after = watcher.newest()
        assert after is not None
        watcher.wait_for_step(after.step + 5, timeout=240)
    finally:
        install_chart(cluster)

    newest = watcher.newest()
    assert newest is not None
    assert newest.attempt_id == world.attempt_id, "the job was restarted"
    assert {pod.uid for pod in watcher.pods} == pods
