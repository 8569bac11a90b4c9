"""What README and how-to pages tell people to apply is taken by a real API server, to the last field; and each field
of the spec stands in a job of some page.

A page may also show a part of a job alone: it is taken as part of the smallest one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "how-to").glob("*.md"))]
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
CRD = yaml.safe_load((ROOT / "crds" / "holdfast.dev_faulttolerantjobs.yaml").read_text())
SPEC = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
SMALLEST = {
    "workers": {"replicas": 8, "template": {"spec": {"containers": [{"name": "trainer", "image": "train:1"}]}}}
}
VALUES = "# values.yaml\n"
A_PODS_OWN = ("workers.template.",)
"""Fields of Kubernetes, not of ours."""


def jobs(page: Path) -> list[dict[str, Any]]:
    ours = (block for block in BLOCK.findall(page.read_text()) if not block.startswith(VALUES))
    found = (job_of(document) for block in ours for document in yaml.safe_load_all(block))
    return [job for job in found if job is not None]


def job_of(document: Any) -> dict[str, Any] | None:
    """A job as it stands there, or the smallest one with the part that does; None for anything else."""
    if not isinstance(document, dict) or document.get("kind") == "FaultTolerantJob":
        return document or None
    part = document["spec"] if document.keys() == {"spec"} else document
    if not part.keys() <= SPEC["properties"].keys():
        return None
    head = {"apiVersion": "holdfast.dev/v1alpha1", "kind": "FaultTolerantJob", "metadata": {"name": "part"}}
    return {**head, "spec": {**SMALLEST, **part}}


def fields(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Paths of all fields that have none below them."""
    inner = schema.get("items", schema).get("properties")
    if inner is None:
        yield path
        return
    for name, field in inner.items():
        yield from fields(field, f"{path}.{name}".strip("."))


def fields_of(value: Any, path: str = "") -> Iterator[str]:
    """The same of what somebody wrote: paths of all that is no mapping and no list of such."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for item in value:
            yield from fields_of(item, path)
    elif isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from fields_of(inner, f"{path}.{name}".strip("."))
    else:
        yield path


def test_there_are_pages() -> None:
    assert jobs(PAGES[0])
    assert any(jobs(page) for page in PAGES[1:])


def test_each_field_of_the_spec_stands_in_a_job_of_some_page() -> None:
    shown = {path for page in PAGES for job in jobs(page) for path in fields_of(job["spec"])}
    ours = {path for path in fields(SPEC) if not path.startswith(A_PODS_OWN)}
    assert len(ours) > 60, "the schema was read"
    assert sorted(ours - shown) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_job_of_a_page_is_taken(admin: Any, cluster: Any, page: Path) -> None:
    api = client.CustomObjectsApi(admin)
    for job in jobs(page):
        api.create_namespaced_custom_object(
            "holdfast.dev",
            "v1alpha1",
            "default",
            "faulttolerantjobs",
            job,
            dry_run="All",
            field_validation="Strict",
        )
