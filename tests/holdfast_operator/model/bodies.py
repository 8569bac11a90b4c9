"""Jobs, nodes and pods as the API server returns them, and what their specs ask of a scheduler."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.times import format_seconds

Body = dict[str, Any]

START = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)


def job_body(name: str = "gpt", *, replicas: int = 3, minimum: int = 2, **spec: Any) -> Body:
    """A job as the API server returns it."""
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "FaultTolerantJob",
        "metadata": {
            "name": name,
            "namespace": "ml",
            "uid": f"job-{name}",
            "generation": 1,
            "resourceVersion": "1",
            "creationTimestamp": format_seconds(START),
        },
        "spec": {
            "workers": {
                "replicas": replicas,
                "template": {
                    "spec": {
                        "containers": [
                            {
                                "name": "trainer",
                                "image": "train:1",
                                "command": ["holdfast", "run", "--", "python", "train.py"],
                                "resources": {"requests": {"cpu": "900m"}},
                            }
                        ]
                    }
                },
            },
            "elasticity": {"minReplicas": minimum, "onFailure": "Shrink"},
            "checkpoint": {"volume": {"claimName": "checkpoints"}, "intervalSteps": 50},
            **spec,
        },
    }


def node_body(name: str, *, cpu: str = "2", ready: bool = True) -> Body:
    """A node as the API server returns it."""
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": {"kubernetes.io/hostname": name}},
        "spec": {},
        "status": {
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True" if ready else "Unknown",
                    "lastHeartbeatTime": format_seconds(START),
                }
            ],
            "allocatable": {"cpu": cpu, "memory": "8Gi", "pods": "110"},
            "nodeInfo": {"bootID": f"boot-{name}-1"},
        },
    }


def merge(before: Any, patch: Any) -> Any:
    """RFC 7396, as the API server does it."""
    if not isinstance(patch, dict):
        return patch
    kept = dict(before) if isinstance(before, dict) else {}
    for key, value in patch.items():
        kept[key] = merge(kept.get(key), value)
    return {key: value for key, value in kept.items() if value is not None}


def restore(body: Body, marks: Body) -> bool:
    body["metadata"]["labels"] |= marks["labels"]
    body["metadata"]["ownerReferences"] = marks["ownerReferences"]
    return True


def lift_gang_gate(spec: Body, labels: dict[str, str]) -> bool:
    """As the API server takes it: labels are added with the gate's end, never later."""
    gates = spec.pop("schedulingGates", [])
    others = [gate for gate in gates if gate["name"] != c.GANG_GATE]
    if others:
        spec["schedulingGates"] = others
    if len(others) == len(gates):
        return False
    if labels:
        spec["nodeSelector"] = {**spec.get("nodeSelector", {}), **labels}
    return True


def _terms(body: Body) -> list[Body]:
    affinity = body["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms: list[Body] = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get(
        "nodeSelectorTerms", []
    )
    return terms


def avoided_nodes(body: Body) -> set[str]:
    return {node for term in _terms(body) for field in term.get("matchFields", []) for node in field["values"]}


def last_choices(body: Body) -> set[str]:
    affinity = body["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])
    fields = [field for term in terms for field in term["preference"].get("matchFields", [])]
    return {node for field in fields for node in field["values"]}


def excluded_labels(body: Body) -> list[tuple[str, list[str]]]:
    found = [expression for term in _terms(body) for expression in term.get("matchExpressions", [])]
    return [(expression["key"], expression["values"]) for expression in found if expression["operator"] == "NotIn"]


def keeps_apart(body: Body, other: Body) -> bool:
    """One of the two wants no worker beside it, or no other job's and they are of two jobs."""
    if any(pod["spec"].get("hostNetwork") for pod in (body, other)):
        return True
    exclusive = any("podAntiAffinity" in pod["spec"].get("affinity", {}) for pod in (body, other))
    return exclusive and body["metadata"]["labels"][c.LABEL_JOB] != other["metadata"]["labels"][c.LABEL_JOB]
