"""Monitors, alerts and dashboards for the Prometheus operator and Grafana."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from charted import MONITORING, NAMESPACED, one, worker_pod_on

from holdfast_operator.manifests.installation import Installation
from holdfast_testbed.fakes.chart import CHART, render

pytestmark = pytest.mark.integration  # needs the Helm CLI


@pytest.fixture
def worker_pod() -> dict[str, Any]:
    """A worker's pod as the operator makes it."""
    return worker_pod_on(Installation(sidecar_image="s", agents_url="https://o", ca_bundle="PEM"))


def test_nothing_of_monitoring_is_there_unless_asked_for() -> None:
    kinds = {document["kind"] for document in render()}
    assert not kinds & {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap"}


def test_the_service_monitor_finds_the_operators_metrics() -> None:
    documents = render(*MONITORING, "monitoring.serviceMonitor.labels.release=prom")
    monitor, service = one(documents, "ServiceMonitor"), one(documents, "Service")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["metadata"]["labels"]["release"] == "prom"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["honorLabels"] is True, "the per-job gauges have their own label namespace"


def test_the_pod_monitor_finds_the_workers_of_every_namespace_and_says_whose_they_are(worker_pod: Any) -> None:
    spec = one(render(*MONITORING), "PodMonitor")["spec"]
    assert spec["namespaceSelector"] == {"any": True}
    assert spec["selector"]["matchLabels"].items() <= worker_pod["metadata"]["labels"].items()
    assert worker_pod["metadata"]["labels"]["holdfast.dev/job-name"] == "gpt"
    (endpoint,) = spec["podMetricsEndpoints"]
    (sidecar,) = worker_pod["spec"]["initContainers"]
    assert endpoint["port"] in {port["name"] for port in sidecar["ports"]}
    assert {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"} in endpoint["relabelings"]
    named = {"sourceLabels": ["__meta_kubernetes_pod_label_holdfast_dev_job_name"], "targetLabel": "job_name"}
    assert named in endpoint["relabelings"]
    (kept,) = endpoint["metricRelabelings"]
    assert (kept["action"], kept["regex"]) == ("keep", "holdfast_.*"), "a tenant's pod may have the same labels"
    rules = (CHART / "rules" / "holdfast.yaml").read_text()
    assert f'up{{container="{sidecar["name"]}"}}' in rules


def test_the_pod_monitor_looks_where_the_operator_does() -> None:
    spec = one(render(*MONITORING, *NAMESPACED), "PodMonitor")["spec"]
    assert spec["namespaceSelector"] == {"matchNames": ["team-a", "team-b"]}


def test_the_rules_are_those_of_the_file_with_the_runbooks_where_they_are_published() -> None:
    rules = one(render(*MONITORING, "monitoring.prometheusRule.runbooks=https://docs.example/r"), "PrometheusRule")
    text = (CHART / "rules" / "holdfast.yaml").read_text()
    assert one(render(*MONITORING), "PrometheusRule")["spec"] == yaml.safe_load(text)
    found = [rule for group in rules["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    urls = [rule["annotations"]["runbook_url"] for rule in found]
    assert urls
    assert all(re.fullmatch(r"https://docs\.example/r/Holdfast\w+", url) for url in urls)


def test_the_gpu_alerts_read_the_series_that_the_installer_names() -> None:
    selector = 'job="gpus",cluster="a"'
    values = ('monitoring.prometheusRule.gpuSelector=job="gpus"\\,cluster="a"',)
    text = json.dumps(one(render(*MONITORING, *values), "PrometheusRule")["spec"]).replace('\\"', '"')
    read = re.findall(r"DCGM_\w+(\{[^}]*\})?", text)
    assert set(read) == {f"{{{selector}}}"}


def test_the_dashboards_are_in_a_config_map_that_grafana_finds() -> None:
    folder = CHART / "dashboards"
    found = one(render(*MONITORING), "ConfigMap", "holdfast-dashboards")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["data"].keys() == {f"holdfast-{path.name}" for path in folder.iterdir()}
    for path in folder.iterdir():
        assert json.loads(found["data"][f"holdfast-{path.name}"]) == json.loads(path.read_text())
