"""The schema is the documentation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast_testbed.cluster.cluster import Cluster


def test_every_field_is_explained(cluster: Cluster) -> None:
    """`kubectl explain` is the documentation: no field of spec or status is without words, top to bottom."""
    crd = json.loads(cluster.kubectl("get", "crd", "faulttolerantjobs.holdfast.dev", "-o", "json"))
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    spec = schema["properties"]["spec"]
    assert [path for path, node in walk(spec, "spec") if not node.get("description")] == []
    status = schema["properties"]["status"]["properties"]
    assert [name for name, node in status.items() if not node.get("description")] == []


def walk(node: dict[str, Any], path: str) -> list[tuple[str, dict[str, Any]]]:
    found = [(path, node)]
    for name, child in node.get("properties", {}).items():
        found += walk(child, f"{path}.{name}")
    if node.get("items", {}).get("properties"):
        found += walk(node["items"], f"{path}[]")
    return found


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("ftj.spec.recovery", "How many failures the job tolerates before it fails"),
        ("ftj.spec.recovery.budgets", "A cause without a budget has no limit"),
        ("ftj.spec.elasticity.onFailure", "Replace: the other workers wait for the replacement"),
        ("ftj.spec.checkpoint.intervalSteps", "Holdfast chooses an interval between 10 seconds and 30 minutes"),
    ],
)
def test_kubectl_explain_reads_like_documentation(cluster: Cluster, path: str, says: str) -> None:
    text = " ".join(cluster.kubectl("explain", path).split())
    assert says in text
