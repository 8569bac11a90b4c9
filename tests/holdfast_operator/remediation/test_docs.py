"""The how-to's examples mean what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast_operator.api.node_mark import Mode
from holdfast_operator.api.reasons import NodeReason
from holdfast_operator.remediation.settings import parse_rules
from holdfast_testbed.build.commands import run
from holdfast_testbed.build.programs import program

GUIDE = (Path(__file__).parents[3] / "docs" / "how-to" / "node-remediation.md").read_text()


def examples() -> list[Any]:
    return [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)]


def test_the_values_are_values() -> None:
    values = [example["nodeRemediation"] for example in examples() if "nodeRemediation" in example]
    first, replacing = [parse_rules(json.dumps({k: v for k, v in each.items() if k != "token"})) for each in values]
    assert (first.mode, first.dry_run, first.max_unavailable.of(100)) == (Mode.DRAIN, True, 10)
    assert first.action({"alertname": "HoldfastGpuXid", "xid": "79"}) == (first.alerts[0], Mode.DRAIN)
    assert first.action({"alertname": "HoldfastGpuXid", "xid": "13"}) == (first.alerts[1], Mode.CORDON)
    assert (replacing.mode, replacing.provider) == (Mode.REPLACE, "AWS")


def test_documented_alertmanager_route_reaches_the_operator() -> None:
    """Resolved alerts are sent too."""
    (manager,) = [example for example in examples() if "receivers" in example]
    (hook,) = manager["receivers"][1]["webhook_configs"]
    assert hook["url"].endswith(":8443/v1/alerts")
    assert hook["send_resolved"] is True


def test_documented_repeat_interval_is_short() -> None:
    """A restarted operator may have forgotten an alert."""
    (manager,) = [example for example in examples() if "receivers" in example]
    (route,) = manager["route"]["routes"]
    assert route["repeat_interval"] == "5m"


@pytest.mark.integration  # needs amtool
def test_alertmanager_takes_the_example(tmp_path: Path) -> None:
    (manager,) = [example for example in examples() if "receivers" in example]
    (tmp_path / "alertmanager.json").write_text(json.dumps(manager))
    assert "SUCCESS" in run([program("amtool"), "check-config", tmp_path / "alertmanager.json"])


def test_every_reason_that_can_be_told_is_explained() -> None:
    assert [reason for reason in NodeReason if f"`{reason}`" not in GUIDE] == []
