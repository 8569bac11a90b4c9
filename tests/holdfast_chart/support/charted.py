"""Parts of rendered charts that several tests read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast_operator import helm_test
from holdfast_operator.api.job import parse_job
from holdfast_operator.api.status import Worker
from holdfast_operator.manifests.installation import Installation
from holdfast_operator.manifests.pod import pod
from holdfast_operator.settings import from_environment
from holdfast_testbed.fakes.chart import render

Manifest = dict[str, Any]

NAMESPACED = ("watchNamespaces={team-a,team-b}",)
MONITORING = tuple(
    f"monitoring.{name}.enabled=true" for name in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboards")
)
OPENSHIFT = ("podSecurityContext.runAsUser=null", "podSecurityContext.runAsGroup=null", "sidecar.runAsUser=null")


def all_of(documents: Sequence[Manifest], kind: str) -> list[Manifest]:
    return [document for document in documents if document["kind"] == kind]


def one(documents: Sequence[Manifest], kind: str, name: str | None = None) -> Manifest:
    found = [d for d in documents if d["kind"] == kind and name in (None, d["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} objects of kind {kind}"
    return found[0]


def pod_of(documents: Sequence[Manifest]) -> Manifest:
    """The specification of the operator's pods."""
    spec: Manifest = one(documents, "Deployment")["spec"]["template"]["spec"]
    return spec


def container(documents: Sequence[Manifest]) -> Manifest:
    (only,) = pod_of(documents)["containers"]
    assert isinstance(only, dict)
    return only


def environment(documents: Sequence[Manifest]) -> dict[str, str]:
    return {v["name"]: v["value"] for v in container(documents)["env"] if "value" in v}


def is_aggregated(document: Manifest) -> bool:
    """Whether a role is part of the cluster's own roles, and not the operator's."""
    return any("aggregate-to" in label for label in document["metadata"]["labels"])


def rules(documents: Sequence[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Each rule of the operator's roles, with the kind of its role."""
    for document in documents:
        if document["kind"] in ("ClusterRole", "Role") and not is_aggregated(document):
            for rule in document["rules"]:
                yield document["kind"], rule


def hooks(*values: str) -> list[Manifest]:
    """The objects that `helm test` creates."""
    found = render(*values, hooks=True)
    return [d for d in found if "helm.sh/hook" in (d["metadata"].get("annotations") or {})]


def smoke_job(*values: str) -> Manifest:
    """The job of `helm test`."""
    (only,) = one(hooks(*values), "Pod")["spec"]["containers"]
    *command, job, _seconds = only["command"]
    assert command == ["python", "-m", helm_test.__name__]
    found: Manifest = json.loads(job)
    return found


def worker_pod_on(installation: Installation) -> Manifest:
    """A worker's pod as the operator creates it."""
    job = parse_job(
        {
            "metadata": {"name": "gpt", "namespace": "ml", "uid": "u", "resourceVersion": "1", "generation": 1,
                         "creationTimestamp": "2026-01-31T12:00:00Z"},
            "spec": {"workers": {"replicas": 1, "template": {"spec": {"containers": [{"name": "t", "image": "i"}]}}}},
        }
    )  # fmt: skip
    assert job.spec is not None
    return pod(job, job.spec, Worker(incarnation=0, batch=0), installation)


def sidecar_of(documents: Sequence[Manifest]) -> Manifest:
    """The sidecar that an operator with these values adds to a worker's pod."""
    found = from_environment(environment(documents) | {"HOLDFAST_NAMESPACE": "x"})
    installation = Installation(
        sidecar_image=found.sidecar_image,
        agents_url=found.agents_url,
        ca_bundle="PEM",
        sidecar_user=found.sidecar_user,
        sidecar_resources=found.sidecar_resources,
    )
    sidecar: Manifest = worker_pod_on(installation)["spec"]["initContainers"][0]
    return sidecar
