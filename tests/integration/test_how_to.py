"""What README and how-to pages tell people to apply is taken by a real API server, to the last field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "how-to").glob("*.md"))]
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)


def jobs(page: Path) -> list[dict[str, Any]]:
    blocks = BLOCK.findall(page.read_text())
    found = [document for block in blocks for document in yaml.safe_load_all(block)]
    return [document for document in found if document and document.get("kind") == "FaultTolerantJob"]


def test_there_are_pages() -> None:
    assert jobs(PAGES[0])
    assert any(jobs(page) for page in PAGES[1:])


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
