"""The reference page of the resource is the CRD's, and names a how-to page for each group of fields."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "faulttolerantjob.md"
CRD = yaml.safe_load((ROOT / "crds" / "holdfast.dev_faulttolerantjobs.yaml").read_text())
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
GROUPS = SCHEMA["properties"]["spec"]["properties"]


def test_the_page_is_the_one_that_the_generator_makes(tmp_path: Path) -> None:
    made = tmp_path / "page.md"
    subprocess.run([sys.executable, ROOT / "tools" / "crd_reference.py", made], check=True)
    assert made.read_text() == PAGE.read_text(), "run 'make generate'"


@pytest.mark.parametrize("group", GROUPS)
def test_each_group_of_fields_has_pages_that_show_it(group: str) -> None:
    text = PAGE.read_text()
    (links,) = re.findall(rf"^## spec\.{group}\n.*?^How to: ([^\n]*)$", text, re.MULTILINE | re.DOTALL)[:1]
    pages = re.findall(r"\]\(\.\./how-to/([\w-]+)\.md\)", links)
    assert pages
    for page in pages:
        shown = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "how-to" / f"{page}.md").read_text(), re.M | re.S)
        assert any(re.search(rf"^ *{group}:", block, re.MULTILINE) for block in shown), (
            f"{page} does not show {group}"
        )


def test_every_list_has_a_list_type() -> None:
    found = dict(lists(SCHEMA, ""))
    assert ".spec.recovery.rules[].onPodConditions" in found
    assert [path for path, schema in found.items() if "x-kubernetes-list-type" not in schema] == []


def lists(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if schema.get("type") == "array":
        yield path, schema
        yield from lists(schema["items"], f"{path}[]")
    for name, field in schema.get("properties", {}).items():
        yield from lists(field, f"{path}.{name}")
