"""Resources that a real API server takes, however odd: each has its word from the operator, and others train."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from odd_resources import SPECS
from stage import Stage

pytestmark = pytest.mark.thorough

DRAWN = 80
MOST_WORKERS = 3


def drawn() -> list[dict[str, Any]]:
    """The same ones each time, so that what fails can be looked at."""
    found: list[dict[str, Any]] = []

    @settings(max_examples=DRAWN, derandomize=True, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
    @given(spec=SPECS)
    def draw(spec: dict[str, Any]) -> None:
        workers = {**spec["workers"], "replicas": min(spec["workers"]["replicas"], MOST_WORKERS)}
        found.append({**spec, "workers": workers})

    draw()
    return found


def test_a_misspelt_field_of_the_template_is_named(stage: Stage) -> None:
    """The API server would drop it, and the pod would run without its node selector or its GPUs."""
    job = stage.job("typo")
    pod = job["spec"]["workers"]["template"]["spec"]
    pod["nodeSelecter"] = {"accelerator": "h100"}
    pod["containers"][0]["resource"] = {"limits": {"nvidia.com/gpu": 8}}
    stage.apply(job)
    stage.wait(lambda: stage.status("typo").get("summary") == "TemplateInvalid", "the template is refused")
    message = next(c["message"] for c in stage.status("typo")["conditions"] if c["type"] == "Degraded")
    assert 'unknown field "spec.nodeSelecter"' in message
    assert 'unknown field "spec.containers[0].resource"' in message
    assert stage.core.list_namespaced_pod(stage.namespace).items == []


def degraded(stage: Stage, name: str, reason: str) -> str:
    """The message, once the job is so."""
    stage.wait(lambda: stage.condition("Degraded", name)["reason"] == reason, f"{name} is {reason}")
    return str(stage.condition("Degraded", name)["message"])


def refused(stage: Stage) -> bool:
    """Whether the policy refuses a pod like ours; nothing is created."""
    init = {"name": "sidecar", "image": "x", "securityContext": {"runAsUser": 65532}}
    spec = {"containers": [{"name": "trainer", "image": "x"}], "initContainers": [init]}
    try:
        stage.core.create_namespaced_pod(
            stage.namespace, {"metadata": {"name": "probe"}, "spec": spec}, dry_run="All"
        )
    except ApiException as error:
        return "denied request" in str(error.body)
    return False


@pytest.fixture
def decodes_deep() -> Iterator[None]:
    """This process reads such jobs as well, until they are gone."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(12_000)
    yield
    sys.setrecursionlimit(before)


@pytest.fixture
def refusing_policy(stage: Stage) -> Iterator[None]:
    """As a platform's own: it refuses a user that Holdfast sets for its sidecar."""
    api, name = client.AdmissionregistrationV1Api(stage.api), f"refuses-{stage.namespace}"
    rules = [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}]
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": stage.namespace}}}
    no_user = "!object.spec.initContainers.exists(c, has(c.securityContext.runAsUser))"
    policy = {"matchConstraints": {"resourceRules": rules}, "validations": [{"expression": no_user}]}
    binding = {"policyName": name, "validationActions": ["Deny"], "matchResources": here}
    api.create_validating_admission_policy({"metadata": {"name": name}, "spec": policy})
    api.create_validating_admission_policy_binding({"metadata": {"name": name}, "spec": binding})
    stage.wait(lambda: refused(stage), "the policy is in force")
    yield
    api.delete_validating_admission_policy_binding(name)
    api.delete_validating_admission_policy(name)


@pytest.mark.usefixtures("refusing_policy")
def test_pod_refused_by_a_policy_does_not_blame_the_template(stage: Stage) -> None:
    stage.apply(stage.job("refused"))
    assert f"'refuses-{stage.namespace}'" in degraded(stage, "refused", "AdmissionDenied")


def post(stage: Stage, job: str) -> None:
    """As it stands: the client's own encoder has a limit of depth."""
    url = f"{stage.api.configuration.host}/apis/holdfast.dev/v1alpha1/namespaces/{stage.namespace}/faulttolerantjobs"
    headers = {"Content-Type": "application/json"}
    answer = stage.api.rest_client.pool_manager.request("POST", url, body=job.encode(), headers=headers)
    assert answer.status == 201, answer.data


@pytest.mark.usefixtures("decodes_deep")
def test_too_deep_or_too_large_job_is_named_and_blocks_nobody(stage: Stage) -> None:
    """The API server takes values that are nested up to 10,000 deep, and objects of 1.5 MiB."""
    stage.nodes(2)
    large = stage.job("large")
    large["spec"]["workers"]["template"]["spec"]["containers"][0]["args"] = ["x" * 1_000_000]
    stage.apply(large)
    deep = stage.job("deep")
    deep["spec"]["workers"]["template"]["spec"]["containers"][0]["args"] = "ARGUMENTS"
    post(stage, json.dumps(deep).replace('"ARGUMENTS"', "[" * 1100 + "]" * 1100))
    assert "deeper than 64 levels" in degraded(stage, "deep", "InvalidSpec")
    assert "more than 128 KiB" in degraded(stage, "large", "InvalidSpec")
    stage.operator.restart()
    stage.run(replicas=2)
    assert {
        pod.metadata.labels["holdfast.dev/job-name"] for pod in stage.core.list_namespaced_pod(stage.namespace).items
    } == {"gpt"}


def test_any_accepted_resource_is_answered_and_blocks_nobody(stage: Stage) -> None:
    """The API server accepts the resource."""
    stage.nodes(3, cpu="64")
    taken = []
    for number, spec in enumerate(drawn()):
        body = {**stage.job(f"odd-{number}"), "spec": spec}
        try:
            stage.apply(body)
        except ApiException as error:
            if error.status not in (400, 422):
                raise
        else:
            taken.append(f"odd-{number}")
    assert len(taken) > DRAWN // 4, "most are odd in what the schema leaves open"

    player = stage.run(replicas=2)
    stage.wait(lambda: all(stage.status(name).get("summary") for name in taken), "each has its word")
    stage.operator.restart()
    step = player.step
    stage.wait(lambda: (stage.status().get("progress") or {}).get("step", 0) > step, "the other trains on")
    assert stage.status().get("incidentCount", 0) == 0
    errors = [line for line in stage.operator.lines() if line["level"] in ("error", "critical")]
    assert errors == []
