"""Suspended, resumed, ended in time and deleted: the operator as a real process against a real control plane."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from kubernetes import client
from stage import Stage
from waiting import wait_until

GROUP = ("holdfast.dev", "v1alpha1")
PLURAL = "faulttolerantjobs"
CRD = "faulttolerantjobs.holdfast.dev"


def patch(stage: Stage, **spec: Any) -> None:
    stage.custom.patch_namespaced_custom_object(*GROUP, stage.namespace, PLURAL, "gpt", {"spec": spec})


def true(stage: Stage, kind: str) -> bool:
    return bool(stage.condition(kind)["status"] == "True")


def running(stage: Stage) -> list[str]:
    return [pod.metadata.name for pod in stage.pods() if pod.status.phase in ("Pending", "Running")]


def test_suspended_job_releases_its_pods_and_continues(stage: Stage) -> None:
    """When the job continues, it uses a new pod template."""
    stage.nodes(2)
    stage.run(replicas=2, suspend=False)
    patch(stage, suspend=True)
    stage.wait(lambda: true(stage, "Suspended"), "the job is suspended")
    assert running(stage) == []
    assert "checkpoint" in stage.condition("Suspended")["message"]
    assert "startTime" not in stage.status()
    template = copy.deepcopy(stage.read()["spec"]["workers"]["template"])
    template["spec"]["containers"][0]["image"] = "train:2"
    patch(stage, suspend=False, workers={"template": template})
    stage.wait(lambda: true(stage, "Ready"), "it trains again")
    assert stage.members() == ["gpt-w2", "gpt-w3"]
    assert {stage.pod(name).spec.containers[0].image for name in stage.members()} == {"train:2"}
    assert stage.status().get("incidents", []) == []
    assert stage.condition("Suspended")["reason"] == "JobUnsuspended"


def test_finished_job_is_deleted_after_its_ttl_with_its_objects(stage: Stage) -> None:
    stage.nodes(1)
    player = stage.run(replicas=1, ttlSecondsAfterFinished=1)
    player.stop()
    stage.kubelets.end(stage.namespace, "gpt-w0", 0)
    stage.wait(lambda: not jobs(stage), "the job is gone")
    stage.wait(lambda: not left(stage), "its children are gone")


def test_a_job_may_not_be_active_for_longer_than_it_was_allowed(stage: Stage) -> None:
    stage.nodes(1)
    stage.run(replicas=1)
    begun = datetime.fromisoformat(stage.status()["startTime"])
    allowed = int((datetime.now(UTC) - begun).total_seconds()) + 3
    patch(stage, activeDeadlineSeconds=allowed)
    stage.wait(lambda: true(stage, "Failed"), "its time is over")
    ended = datetime.fromisoformat(stage.status()["completionTime"])
    assert (ended - begun).total_seconds() >= allowed, "it had all of its time"
    assert stage.status()["summary"] == "DeadlineExceeded"
    stage.wait(lambda: not running(stage), "its worker is gone")


@pytest.mark.thorough
def test_job_deleted_while_the_operator_is_down_leaves_nothing(stage: Stage) -> None:
    stage.nodes(2)
    stage.run(replicas=2)
    assert "finalizers" not in stage.read()["metadata"]
    stage.operator.kill()
    stage.launchers[0].stop()
    stage.custom.delete_namespaced_custom_object(*GROUP, stage.namespace, PLURAL, "gpt")
    stage.wait(lambda: not left(stage), "all children are gone")
    assert not jobs(stage)
    stage.operator.start()
    stage.run("next", replicas=1)
    assert 'job="gpt"' not in stage.operator.get("/metrics")[1]
    assert not left(stage), "nothing is made for a job that is gone"


def jobs(stage: Stage) -> list[Any]:
    return list(stage.custom.list_namespaced_custom_object(*GROUP, stage.namespace, PLURAL)["items"])


def left(stage: Stage) -> list[str]:
    core, selector = stage.core, "holdfast.dev/job-name=gpt"
    found = [
        *core.list_namespaced_pod(stage.namespace, label_selector=selector).items,
        *core.list_namespaced_service(stage.namespace, label_selector=selector).items,
        *core.list_namespaced_config_map(stage.namespace, label_selector=selector).items,
    ]
    return [item.metadata.name for item in found]


@pytest.fixture
def older_crd(admin: Any) -> Iterator[Any]:
    """The cluster has the schema of a version that knew less; called, it is upgraded."""
    extensions = client.ApiextensionsV1Api(admin)
    now = json.loads(extensions.read_custom_resource_definition(CRD, _preload_content=False).data)["spec"]
    older = copy.deepcopy(now)
    custom = client.CustomObjectsApi(admin)
    container = {"name": "trainer", "image": "train:1"}
    probe = {
        "apiVersion": "/".join(GROUP),
        "kind": "FaultTolerantJob",
        "metadata": {"name": "probe"},
        "spec": {"suspend": True, "workers": {"replicas": 1, "template": {"spec": {"containers": [container]}}}},
    }

    def knows() -> bool:
        """Whether the schema that is served now has the newer fields."""
        made = custom.create_namespaced_custom_object(*GROUP, "default", PLURAL, probe, dry_run="All")
        return "suspend" in made["spec"]

    schema = older["versions"][0]["schema"]["openAPIV3Schema"]
    schema["x-kubernetes-validations"] = schema["x-kubernetes-validations"][:1]
    for field in ("suspend", "activeDeadlineSeconds", "ttlSecondsAfterFinished"):
        del schema["properties"]["spec"]["properties"][field]
    del schema["properties"]["status"]["properties"]["startedFrom"]

    def put(spec: Any) -> None:
        extensions.patch_custom_resource_definition(CRD, [{"op": "replace", "path": "/spec", "value": spec}])

    put(older)
    wait_until(lambda: not knows(), "the older schema is in force")
    yield lambda: put(now)
    put(now)
    wait_until(knows, "the newer schema is in force")


def test_the_schema_is_upgraded_under_a_running_job(stage: Stage, older_crd: Any) -> None:
    stage.nodes(1)
    player = stage.run(replicas=1)
    older_crd()
    stage.operator.restart()
    step = player.step
    stage.wait(lambda: (stage.status().get("progress") or {}).get("step", 0) > step, "it trains on")
    assert stage.members() == ["gpt-w0"]
    assert len(player.worlds) == 1
    assert stage.status().get("incidents", []) == []

    def suspended() -> bool:
        patch(stage, suspend=True)  # taken once the API server serves the new schema
        return true(stage, "Suspended")

    stage.wait(suspended, "what the new version knows works for the old job")
