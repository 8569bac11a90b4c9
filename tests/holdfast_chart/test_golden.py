"""All objects of the chart for four kinds of installation, so that a change of a template is reviewed as a diff.

Write them again with ``python tests/holdfast_chart/test_golden.py``. What other files have is left out: the schema of
the CRD, the rules and the dashboards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast_testbed.fakes.chart import render

pytestmark = pytest.mark.integration  # needs the Helm CLI

FOLDER = Path(__file__).with_name("golden")
PROFILES = sorted(path.name.removesuffix(".values.yaml") for path in FOLDER.glob("*.values.yaml"))
ELSEWHERE = {"CustomResourceDefinition": "spec", "PrometheusRule": "spec", "ConfigMap": "data"}


def rendered(profile: str) -> str:
    """The objects of a profile, in Helm's order."""
    documents = render(hooks=True, file=FOLDER / f"{profile}.values.yaml")
    return yaml.safe_dump_all(map(shown, documents), sort_keys=False, width=120)


def shown(document: dict[str, Any]) -> dict[str, Any]:
    if (part := ELSEWHERE.get(document["kind"])) is None:
        return document
    assert document[part]
    return document | {part: "…"}


@pytest.mark.parametrize("profile", PROFILES)
def test_the_objects_of_an_installation_are_those_that_were_reviewed(profile: str) -> None:
    assert rendered(profile) == (FOLDER / f"{profile}.yaml").read_text()


if __name__ == "__main__":
    for name in PROFILES:
        (FOLDER / f"{name}.yaml").write_text(rendered(name))
