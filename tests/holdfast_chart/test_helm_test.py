"""`helm test`: a job that the operator understands, and permissions for that job only."""

from __future__ import annotations

from typing import Any

import pytest
from charted import NAMESPACED, hooks, one, smoke_job

from holdfast_operator.api.job import parse_job
from holdfast_testbed.fakes.chart import render

pytestmark = pytest.mark.integration  # needs the Helm CLI


def trainer(job: dict[str, Any]) -> dict[str, Any]:
    (only,) = job["spec"]["workers"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def test_helm_test_runs_a_job_that_the_operator_understands() -> None:
    job = smoke_job()
    times = {"creationTimestamp": "2026-01-31T12:00:00Z", "resourceVersion": "1", "generation": 1, "uid": "u"}
    spec = parse_job({**job, "metadata": {**job["metadata"], **times}}).spec
    assert spec is not None
    assert spec.replicas == 2
    assert trainer(job)["image"] == "docker.io/holdfast/trainer:dev"
    assert trainer(job)["command"][:3] == ["holdfast", "run", "--"]


def test_the_tests_pods_take_what_the_cluster_needs() -> None:
    more = "test.container.resources.requests.cpu=2"
    job = smoke_job("test.podSpec.nodeSelector.gpu=no", more, "test.image.tag=v9")
    assert job["spec"]["workers"]["template"]["spec"]["nodeSelector"] == {"gpu": "no"}
    assert trainer(job)["resources"]["requests"] == {"cpu": 2, "memory": "256Mi"}
    assert trainer(job)["image"].endswith(":v9")


def test_the_test_may_touch_its_own_job_only_and_leaves_nothing() -> None:
    found = hooks()
    assert {d["kind"] for d in found} == {"ServiceAccount", "Role", "RoleBinding", "Pod"}
    named, create = one(found, "Role")["rules"]
    assert (named["resourceNames"], named["verbs"]) == (["holdfast-test"], ["get", "delete"])
    assert create["verbs"] == ["create"]
    selector = one(render(), "Service")["spec"]["selector"]
    for document in found:
        assert "hook-succeeded" in document["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
        assert not selector.items() <= document["metadata"]["labels"].items(), "it is no operator"


def test_the_test_runs_where_the_operator_watches() -> None:
    found = hooks(*NAMESPACED)
    assert {one(found, kind)["metadata"]["namespace"] for kind in ("Role", "RoleBinding")} == {"team-a"}
    assert {one(found, kind)["metadata"]["namespace"] for kind in ("Pod", "ServiceAccount")} == {"holdfast-system"}
    assert smoke_job(*NAMESPACED)["metadata"]["namespace"] == "team-a"
