"""`kubectl scale`, growth into room that is there, and bounds edited in flight, against a real control plane."""

from __future__ import annotations

import json
from typing import Any

import pytest
from stage import Stage

from holdfast_testbed.errors import TestbedError


def test_kubectl_scales_a_job_within_its_bounds(stage: Stage, cluster: Any) -> None:
    stage.nodes(3)
    player = stage.run(replicas=2, elasticity={"maxReplicas": 3, "growCooldownSeconds": 86400})

    def scale(replicas: int) -> None:
        cluster.kubectl("scale", "ftj", "gpt", "-n", stage.namespace, f"--replicas={replicas}")

    scale(3)
    stage.wait(lambda: stage.ready_workers() == (3, 3), "the third trains")
    scale(1)
    stage.wait(lambda: stage.ready_workers() == (1, 1), "one trains")
    assert len(player.worlds[-1][2]) == 1
    assert stage.status().get("incidents", []) == []
    path = f"/apis/holdfast.dev/v1alpha1/namespaces/{stage.namespace}/faulttolerantjobs/gpt/scale"
    shown = json.loads(cluster.kubectl("get", "--raw", path))
    assert shown["status"] == {"replicas": 1, "selector": "holdfast.dev/job-name=gpt"}
    with pytest.raises(TestbedError, match="lower it or raise maxReplicas"):
        scale(4)


def test_job_grows_into_free_capacity_and_returns_it_on_request(stage: Stage) -> None:
    stage.nodes(3)
    player = stage.run(replicas=1, elasticity={"maxReplicas": 2, "growCooldownSeconds": 0})
    stage.wait(lambda: stage.ready_workers() == (2, 1), "it has grown")
    assert stage.condition("Ready")["status"] == "True"
    assert len(player.worlds) == 2
    patch = {"spec": {"elasticity": {"maxReplicas": 1}}}
    group = ("holdfast.dev", "v1alpha1")
    stage.custom.patch_namespaced_custom_object(*group, stage.namespace, "faulttolerantjobs", "gpt", patch)
    stage.wait(lambda: stage.ready_workers() == (1, 1), "it is back at one")
    assert stage.status().get("incidents", []) == []
