"""Values: each has a default, a row in the README and an entry in the schema, and a wrong one is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from holdfast_testbed.build.commands import run
from holdfast_testbed.build.programs import program
from holdfast_testbed.errors import TestbedError
from holdfast_testbed.fakes.chart import CHART, render

pytestmark = pytest.mark.integration  # needs the Helm CLI


def test_lint_finds_nothing() -> None:
    assert "0 chart(s) failed" in run([program("helm"), "lint", "--strict", CHART])


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("nodeRemediation.mode=Eat", "mode"),
        ("nodeRemediation.mode=Drain", "secretName"),
        ("nodeRemediation.maxUnavailable=101%", "maxUnavailable"),
        ("nodeRemediation.alerts[0].alert=Hot", "action"),
        ("nodeRemediation.cooldownSeconds=-1", "cooldownSeconds"),
        ("sidecr.image.tag=1", "sidecr"),
        ("image.tga=1", "additional properties"),
        ("image.tag=1.2@sha256:0", "tag"),
        ("image.digest=sha256:0", "digest"),
        ("sidecar.image.repository=r.example:5000/s", "repository"),
        ("global.imageRegistry=mirror.example/", "imageRegistry"),
        ("tls.secretName=x", "tls"),
        ("crds.install=true", "crds"),
        ("sidecar.runAsUser=0", "runAsUser"),
        ("sidecar.resources.limit.cpu=1", "resources"),
        ("extraEnv[0].value=x", "extraEnv"),
        ("replicaCount=0", "replicaCount"),
        ("watchNamespaces={Team_A}", "watchNamespaces"),
        ("replicas=2", "replicas"),
        ("logLevel=LOUD", "logLevel"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("agents.url=http://holdfast", "agents"),
        ("service.clusterIP=not-an-address", "clusterIP"),
        ("networkPolicy.apiServerPorts[0]=0", "apiServerPorts"),
        ("monitoring.serviceMonitor.interval=soon", "interval"),
        ("monitoring.alerts=true", "monitoring"),
        ("monitoring.prometheusRule.runbooks=https://docs.example/", "runbooks"),
    ],
)
def test_a_wrong_value_is_refused_by_name(value: str, says: str) -> None:
    with pytest.raises(TestbedError, match=says):
        render(value)


def test_every_value_is_in_the_schema_and_every_schema_entry_is_a_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(values: dict[str, Any], entry: dict[str, Any], path: str) -> None:
        while "$ref" in entry:
            entry = schema["definitions"][entry["$ref"].rpartition("/")[2]]
        if "properties" not in entry or set(entry["properties"]) >= {"requests", "limits"}:
            return
        assert set(values) == set(entry["properties"]), path
        assert entry.get("additionalProperties") is False or path == ".global", path
        for name, value in values.items():
            if isinstance(value, dict):
                compare(value, entry["properties"][name], f"{path}.{name}")

    compare(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "")
