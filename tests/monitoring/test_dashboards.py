"""Every query of every dashboard, and every alert, in a real Prometheus that has scraped our exporters."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast_testbed.fakes.monitoring import Prometheus, Sample, prometheus
from holdfast_testbed.waiting import wait_for

pytestmark = pytest.mark.integration  # needs Prometheus

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "charts" / "holdfast" / "dashboards"
RULES = ROOT / "charts" / "holdfast" / "rules" / "holdfast.yaml"
METRIC = re.compile(r"\b(?:holdfast|process|DCGM|up)(?:_\w+)?\b(?=[\[{)\s,]|$)")
CHOSEN = {"$namespace": "ml", "$job_name": "gpt", "$__rate_interval": "4s", "$__range": "30s"}

DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
QUERIES = [
    pytest.param(target["expr"], target["legendFormat"], id=f"{name}: {panel['title']} {target['refId']}")
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
    for target in panel.get("targets", ())
]
VARIABLES = [
    pytest.param(variable["query"]["query"], id=f"{name}: {variable['name']}")
    for name, dashboard in DASHBOARDS.items()
    for variable in dashboard["templating"]["list"]
    if variable["type"] == "query"
]


WELL_SEEN = "min_over_time(up[6s]) == 1 and count_over_time(up[6s]) >= 6"


@dataclass(frozen=True, kw_only=True)
class Watched:
    """Prometheus, and a moment before which it has seen all targets for some seconds without a gap."""

    prometheus: Prometheus
    at: float

    def query(self, expression: str) -> list[Sample]:
        """As of then: how a busy machine answers scrapes later changes nothing."""
        return self.prometheus.query(expression, self.at)


@pytest.fixture(scope="module")
def server(fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Prometheus, after it has watched the fleet for some seconds."""
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "200ms"},
        "rule_files": [str(RULES)],
        "scrape_configs": list(fleet.scrape_configs),
    }
    with prometheus(tmp_path_factory.mktemp("prometheus"), config) as server:
        looked: list[float] = []

        def well_seen() -> bool:
            fleet.live()
            looked.append(server.query("time()")[0].value)
            return len(server.query(WELL_SEEN, looked[-1])) == 4

        wait_for(well_seen, what="all are scraped without a gap", seconds=300, every=0.1)
        yield Watched(prometheus=server, at=looked[-1])


def chosen(expression: str) -> str:
    """What Grafana sends when a namespace and a job are chosen."""
    for name, value in CHOSEN.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def test_scraped_metrics_have_the_labels_alerts_and_panels_need(server):
    """The scrape configuration is that of the how-to page."""
    found = [sample.labels for sample in server.query('up{job!~"dcgm-exporter|holdfast"}')]
    workers = sorted(found, key=lambda labels: labels["pod"])
    assert [{**labels, "instance": ""} for labels in workers] == [
        {
            "__name__": "up",
            "instance": "",
            "namespace": "ml",
            "job": "holdfast-workers",
            "job_name": "gpt",
            "pod": pod,
            "node": "node-1",
            "container": "holdfast-sidecar",
        }
        for pod in ("gpt-w0", "gpt-w1")
    ]
    (operator,) = server.query('up{job="holdfast"}')
    assert operator.labels["namespace"] == "holdfast-system"
    jobs = {
        (sample.labels["namespace"], sample.labels["job_name"])
        for sample in server.query("holdfast_job_workers_desired")
    }
    assert jobs == {("ml", "gpt"), ("ml", "bert")}


@pytest.mark.parametrize(("expression", "legend"), QUERIES)
def test_every_query_has_a_result_with_the_labels_of_its_legend(server, expression, legend):
    found = server.query(chosen(expression))
    assert found
    for sample in found:
        assert not math.isnan(sample.value)
        assert set(re.findall(r"{{(\w+)}}", legend)) <= sample.labels.keys()


@pytest.mark.parametrize(("expression", "legend"), QUERIES)
def test_every_metric_of_a_query_is_exported(server, expression, legend):
    names = set(METRIC.findall(expression))
    assert names
    assert names <= set(server.prometheus.get("/api/v1/label/__name__/values")["data"])


@pytest.mark.parametrize("query", VARIABLES)
def test_every_variable_has_something_to_choose_from(server, query):
    found = re.fullmatch(r"label_values\((.*), (\w+)\)", chosen(query))
    assert found is not None
    assert server.query(f"group by ({found[2]}) ({found[1]})")


def test_alerts_are_evaluated_and_only_the_due_ones_are_raised(server):
    expected = {(name, "ok", "") for name in re.findall(r"(?:alert|record): (\S+)", RULES.read_text())}
    firing = {"HoldfastGpuXid", "HoldfastCheckpointsFailing"}
    due = {
        ("HoldfastJobNotTraining", "pending"),
        ("HoldfastSlowRank", "pending"),
        *((name, "firing") for name in firing),
    }
    # A scrape that took too long hides its target for a moment.
    wait_for(lambda: evaluated(server.prometheus) == expected, what="all rules are evaluated", seconds=120)
    shown: dict[tuple[str, str], dict[str, Any]] = {}

    def only_due() -> bool:
        shown.clear()
        shown.update(raised(server.prometheus))
        return set(shown) == due

    wait_for(only_due, what="the due ones alone are raised", seconds=120)
    xid = shown["HoldfastGpuXid", "firing"]
    assert xid["labels"].items() >= {"node": "node-1", "gpu": "0", "xid": "79"}.items()
    assert xid["annotations"]["summary"] == "GPU 0 of node-1 reported XID 79."


def evaluated(server: Prometheus) -> set[tuple[str, str, str]]:
    groups = server.get("/api/v1/rules")["data"]["groups"]
    return {(rule["name"], rule["health"], rule.get("lastError", "")) for group in groups for rule in group["rules"]}


def raised(server: Prometheus) -> dict[tuple[str, str], dict[str, Any]]:
    return {(alert["labels"]["alertname"], alert["state"]): alert for alert in server.alerts()}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_as_grafana_wants_it(name):
    dashboard = DASHBOARDS[name]
    panels = dashboard["panels"]
    assert dashboard["uid"] == f"holdfast-{name}"
    assert dashboard["schemaVersion"] >= 36
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["type"] in {"row", "stat", "timeseries", "state-timeline"}
        for target in panel.get("targets", ()):
            used = set(re.findall(r"\$(?!__)(\w+)", target["expr"]))
            assert used <= variables
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"


def test_the_dashboards_are_those_that_the_generator_makes(tmp_path):
    subprocess.run([sys.executable, ROOT / "tools" / "dashboards.py", tmp_path], check=True)
    made = {path.stem: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.stem: path.read_text() for path in FOLDER.iterdir()}, "run 'make generate'"
