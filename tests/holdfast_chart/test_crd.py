"""The FaultTolerantJob resource in the chart's templates."""

from __future__ import annotations

import pytest
import yaml
from charted import all_of, one

from holdfast_testbed.fakes.chart import CHART, render

pytestmark = pytest.mark.integration  # needs the Helm CLI

SOURCE = CHART.parents[1] / "crds" / "holdfast.dev_faulttolerantjobs.yaml"
KEEP = {"helm.sh/resource-policy": "keep"}


def test_the_resource_is_that_of_the_source_and_outlives_the_release() -> None:
    source = yaml.safe_load(SOURCE.read_text())
    made = one(render("commonLabels.team=ml"), "CustomResourceDefinition")
    assert made["spec"] == source["spec"]
    assert made["metadata"]["name"] == source["metadata"]["name"]
    assert made["metadata"]["annotations"] == KEEP
    assert made["metadata"]["labels"]["team"] == "ml"


def test_the_resource_can_go_with_the_release_or_be_left_out() -> None:
    assert "annotations" not in one(render("crds.keep=false"), "CustomResourceDefinition")["metadata"]
    assert not all_of(render("crds.enabled=false"), "CustomResourceDefinition")
    assert not list(CHART.glob("crds/*")), "Helm would install it a second time, and never upgrade it"
