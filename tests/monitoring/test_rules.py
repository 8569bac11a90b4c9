"""The alerts: each has its cases, its page, and the labels that its words and its remedy need."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast_sidecar.gpu.rules import COUNT_RULES, COUNTERS, REPLACE_NODE, XID_RULES, CountRule
from holdfast_testbed.build.commands import run
from holdfast_testbed.build.programs import program

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RULES = ROOT / "charts" / "holdfast" / "rules" / "holdfast.yaml"
RUNBOOKS = ROOT / "docs" / "how-to" / "runbooks"

ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: {**rule, "group": group["name"]}
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
CASES = yaml.safe_load((HERE / "rules_test.yaml").read_text())["tests"]


def fired() -> dict[str, set[str]]:
    """Alert → the labels that it has in every case in which it fires."""
    found: dict[str, set[str]] = {}
    for case in CASES:
        for query in case["promql_expr_test"]:
            for sample in query["exp_samples"]:
                labels = dict(re.findall(r'(\w+)="([^"]*)"', sample["labels"]))
                name = labels.get("alertname", "")
                found[name] = found.get(name, set(labels)) & set(labels)
    found.pop("", None)  # counts
    return found


@pytest.mark.integration
def test_promtool_finds_every_case_as_it_should_be() -> None:
    assert "SUCCESS" in run([program("promtool"), "check", "rules", RULES])
    assert "SUCCESS" in run([program("promtool"), "test", "rules", HERE / "rules_test.yaml"])


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    assert fired().keys() == ALERTS.keys()


@pytest.mark.parametrize("name", ALERTS)
def test_what_an_alert_says_names_only_labels_that_it_has(name: str) -> None:
    words = " ".join(ALERTS[name]["annotations"].values())
    words = re.sub(r"{{ with \$labels\.\w+ }}.*?{{ end }}", "", words)  # shown only if the alert has the label
    assert set(re.findall(r"\$labels\.(\w+)", words)) <= fired()[name]


@pytest.mark.parametrize("name", [name for name, rule in ALERTS.items() if rule["group"] == "holdfast-gpus"])
def test_an_alert_whose_remedy_is_a_nodes_names_the_node(name: str) -> None:
    assert {"node", "gpu", "UUID"} <= fired()[name]


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_severity_words_and_a_page(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/how-to/runbooks/{name}.md"
    page = (RUNBOOKS / f"{name}.md").read_text()
    assert page.startswith(f"# {name}\n")
    for heading in ("## What it means", "## What to look at", "## What to do"):
        assert f"\n{heading}\n" in page


def test_every_page_is_an_alerts_and_in_the_list() -> None:
    pages = {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"}
    assert pages == ALERTS.keys()
    listed = re.findall(r"\]\((\w+)\.md\)", (RUNBOOKS / "README.md").read_text())
    assert sorted(listed) == sorted(ALERTS)


def test_alerting_xids_are_those_with_advice_to_leave_the_node() -> None:
    """The sidecar gives the advice."""
    (listed,) = re.findall(r'xid=~"([0-9|]+)"', ALERTS["HoldfastGpuXid"]["expr"])
    advised = {xid for rule in XID_RULES if rule.action == REPLACE_NODE for xid in rule.xids}
    assert {int(xid) for xid in listed.split("|")} == advised


def limits() -> dict[frozenset[str], tuple[float, int | None]]:
    """Of what an alert asks of the exporter's counters: fields → so many errors within so many seconds; of one error
    the time does not matter."""
    found = {}
    for name in (name for name, rule in ALERTS.items() if rule["group"] == "holdfast-gpus"):
        asked = re.sub(r".*label_join\(|\"node\", \"/\".*", "", ALERTS[name]["expr"])
        for term in re.split(r"(?<=1e9) or ", asked):
            fields = frozenset(re.findall(r"DCGM_\w+", term))
            limit, span = re.search(r">=? (\d+)", term), re.search(r"\[(\d+)([mh])\]", term)
            if not limit:
                continue
            seconds = int(span[1]) * {"m": 60, "h": 3600}[span[2]] if span else None
            number = float(limit[1]) * (seconds if seconds and "rate(" in term else 1)
            found[fields] = (number, seconds) if number else (1.0, None)
    return found


@pytest.mark.parametrize("rule", COUNT_RULES, ids=lambda rule: rule.kind)
def test_so_many_errors_raise_an_alert_as_the_sidecar_reports(rule: CountRule) -> None:
    fields = frozenset(COUNTERS[counter][0] for counter in rule.counters)
    assert limits()[fields] == (rule.at_least, rule.seconds if rule.at_least > 1 else None)
