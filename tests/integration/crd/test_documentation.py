"""The schema is the documentation, and helm's copy of it is upgraded as the chart's page says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from holdfast_testbed.cluster.cluster import Cluster

README = Path(__file__).resolve().parents[3] / "charts" / "holdfast" / "README.md"
DEFINITION = README.parent / "crds" / "holdfast.dev_faulttolerantjobs.yaml"


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


def test_a_definition_that_helm_installed_is_upgraded_as_documented(cluster: Cluster, tmp_path: Path) -> None:
    """The definition has to differ: the same one twice raises no conflict."""
    command = re.search(r"`kubectl (apply [^`]*) -f charts/holdfast/crds/`", README.read_text())
    assert command is not None
    other = (
        DEFINITION.read_text().replace("holdfast.dev", "upgrade.holdfast.dev").replace("faulttolerantjob", "jobcopy")
    )
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(other.replace("FaultTolerantJob", "JobCopy").replace("shortNames: [ftj]", "shortNames: [jc]"))
    new.write_text(old.read_text().replace("Number of workers", "The number of workers"))
    assert old.read_text() != new.read_text()
    cluster.kubectl("create", "--field-manager=helm", "-f", str(old))
    try:
        cluster.kubectl(*command[1].split(), "-f", str(new))
        found = cluster.kubectl("get", "crd", "jobcopys.upgrade.holdfast.dev", "-o", "yaml")
        assert "The number of workers" in found
    finally:
        cluster.kubectl("delete", "--wait=false", "-f", str(old))
