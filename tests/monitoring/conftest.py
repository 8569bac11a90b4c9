"""Our exporters with something to say: the operator's, and sidecars' with a launcher that trains."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase

from holdfast_operator.api.job import parse_job
from holdfast_operator.api.status import Worker
from holdfast_operator.manifests.installation import Installation
from holdfast_operator.manifests.pod import pod
from holdfast_operator.remediation.metrics import RemediationMetrics
from holdfast_operator.runtime.health import HealthServer
from holdfast_operator.runtime.metrics import Metrics as OperatorMetrics
from holdfast_sidecar.gpu.monitor import GpuWatch
from holdfast_sidecar.metrics import gpu as gpu_metrics
from holdfast_sidecar.metrics.exporter import Metrics as SidecarMetrics
from holdfast_sidecar.metrics.server import Server, metrics_page
from holdfast_sidecar.protocol.document import format_time
from holdfast_sidecar.protocol.notice import Notice
from holdfast_sidecar.protocol.report import Pod
from holdfast_sidecar.run_dir.launcher_status import LauncherStatusWatcher
from holdfast_sidecar.runtime.clock import SystemClock
from holdfast_sidecar.runtime.http import Response, Transport

CONTRACT = Path(__file__).parents[1] / "contract"
ROOT = Path(__file__).parents[2]

Json = dict[str, Any]


def golden(name: str) -> Any:
    return json.loads((CONTRACT / name).read_text())


@dataclass(kw_only=True)
class Sidecar:
    """A sidecar's exporter over a status file that the test moves on."""

    metrics: SidecarMetrics
    heartbeat: LauncherStatusWatcher
    folder: Path
    step: int = 412

    def live(self) -> None:
        """The launcher goes on by a step and says so."""
        self.step += 1
        status = golden("status.json")
        books = status["accounting"]
        now = format_time(datetime.now(UTC))
        books["wallSeconds"] += self.step
        books["seconds"]["productive"] += 0.97 * self.step
        books["seconds"]["checkpoint"] += 0.03 * self.step
        books["steps"] = self.step
        for recovery in books["recoveries"]:
            recovery |= {"count": self.step, "sum": 0.15 * self.step}
            recovery["buckets"] = [[bound, self.step if bound >= 0.2 else 0] for bound, _count in recovery["buckets"]]
        status |= {"committedStep": self.step, "committedAt": now}
        status["checkpoints"]["shared"]["time"] = now
        (self.folder / "status.json").write_text(json.dumps(status))
        self.heartbeat.poll()
        self.metrics.report(ok=True)


class Exporter:
    """The node's dcgm-exporter, as the sidecar asks it."""

    def request(self, *_arguments: object, **_options: object) -> Response:
        return Response(status=200, headers={}, body=(Path(__file__).parent / "dcgm.txt").read_bytes())


POD = Pod(namespace="ml", name="gpt-w0", uid="u", node="node-1")


def make_sidecar(folder: Path) -> Sidecar:
    """Everything that can happen to it has happened once, and no launcher has spoken."""
    folder.mkdir()
    clock = SystemClock()
    heartbeat = LauncherStatusWatcher(folder, clock)
    gpus = GpuWatch(
        cast(Transport, Exporter()), POD, folder, clock, lambda low, _high: low, launcher_gpus=lambda: ["GPU-a"]
    )
    gpus.tick()
    metrics = SidecarMetrics(clock, heartbeat.current, gpus=lambda: gpu_metrics.metrics(gpus.view(), clock))
    metrics.report(ok=True)
    metrics.report(ok=False)
    metrics.notice(Notice.from_report(golden("report.json")["notices"][0]))
    metrics.poll_error("AWS")
    metrics.stored(7)
    return Sidecar(metrics=metrics, heartbeat=heartbeat, folder=folder)


def make_operator() -> OperatorMetrics:
    """An operator with two jobs to which everything has happened once."""
    metrics = OperatorMetrics(version="1.2.3")
    metrics.set_jobs({"Ready": 1, "Degraded": 1})
    metrics.leads()
    metrics.queue_depth(lambda: 0)
    metrics.long_polls(3)
    metrics.ca_expires(time.time() + 86_400)
    metrics.listed(time.time())
    for job, ready in (("gpt", 3), ("bert", 0)):
        metrics.set_job("ml", job, workers=3, ready=ready, step=412)
        metrics.set_budgets("ml", job, {"Application": (1, 3)})
    metrics.set_slow_ranks("ml", "gpt", {("2", "node-1", "compute"): 3.417})
    work(metrics)
    nodes = RemediationMetrics(metrics.registry)
    nodes.alerts("firing", 1)
    nodes.decided("NodeCordoned")
    nodes.acted("SetMark", "ok")
    return metrics


def work(metrics: OperatorMetrics) -> None:
    """An incident, and the passes and requests that come with it."""
    metrics.incident("Infrastructure")
    metrics.recovered("Infrastructure", 4.0, lost_steps=3)
    metrics.reconciled("ok", 0.01)
    metrics.queue_waited(0.001)
    metrics.agent_request("report", 200)


@pytest.fixture
def sidecar(tmp_path: Path) -> Sidecar:
    return make_sidecar(tmp_path / "run")


@pytest.fixture
def operator() -> OperatorMetrics:
    return make_operator()


@pytest.fixture
def series() -> Callable[[OperatorMetrics | SidecarMetrics], dict[str, tuple[str, frozenset[str]]]]:
    """Name → type and labels of all that one exports, whether or not it has a sample now.

    Without what the client library adds about the process.
    """

    def found(metrics: OperatorMetrics | SidecarMetrics) -> dict[str, tuple[str, frozenset[str]]]:
        if isinstance(metrics, OperatorMetrics):
            declared = [(one._name, one._type, one._labelnames) for one in _declared(metrics)]
        else:
            families = [family for family in metrics.collect() if isinstance(family, Metric)]
            declared = [(family.name, family.type, family._labelnames) for family in families]
        return {
            f"{name}_total" if kind == "counter" else name: (kind, frozenset(labels))
            for name, kind, labels in declared
        }

    return found


def _declared(metrics: OperatorMetrics) -> list[Any]:
    return [one for one in metrics.registry._collector_to_names if isinstance(one, MetricWrapperBase)]


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """An operator, the sidecars of one of its jobs and a dcgm-exporter, each behind its own server."""

    scrape_configs: Sequence[Json]
    """What Prometheus is told of them: docs/how-to/monitoring.md's own, beside dcgm-exporter's."""
    operator: OperatorMetrics
    sidecars: Sequence[Sidecar]

    def live(self) -> None:
        """Time goes on for all of them."""
        work(self.operator)
        for sidecar in self.sidecars:
            sidecar.live()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    operator = make_operator()
    sidecars = {pod: make_sidecar(folder / pod) for pod in ("gpt-w0", "gpt-w1")}
    with ExitStack() as stack:
        health = HealthServer(operator.render, live={}, ready={}, host="127.0.0.1", port=0)
        health.start()
        stack.callback(health.stop)
        found = [_pod(OPERATOR_POD, "operator", f"127.0.0.1:{health.port}")]
        for pod, sidecar in sidecars.items():
            found.append(_pod(worker_pod(pod), "holdfast-sidecar", _serve(sidecar.metrics.render, stack)))
        gpus = (Path(__file__).parent / "dcgm.txt").read_bytes()
        dcgm = {"targets": [_serve(lambda: gpus, stack)], "labels": {"namespace": "gpu-operator"}}
        scraped = [*_as_documented(found), {"job_name": "dcgm-exporter", "static_configs": [dcgm]}]
        yield Fleet(scrape_configs=scraped, operator=operator, sidecars=[*sidecars.values()])


def _as_documented(found: Sequence[Json]) -> list[Json]:
    """The page's scrape configuration, with what Kubernetes would tell Prometheus of these pods told by hand."""
    page = (ROOT / "docs" / "how-to" / "monitoring.md").read_text()
    (text,) = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "scrape_configs" in block]
    configs = yaml.safe_load(text)["scrape_configs"]
    for config in configs:
        assert config.pop("kubernetes_sd_configs") == [{"role": "pod"}]
        config["static_configs"] = [*found, *DECOYS]
    return list(configs)


def _pod(pod: Json, container: str, address: str, phase: str = "Running") -> Json:
    """A target with the labels that Prometheus makes of a container's port."""
    containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]
    (port,) = [
        port["name"]
        for one in containers
        for port in one.get("ports", ())
        if one["name"] == container and port["name"] in ("http", "holdfast")
    ]
    meta = {
        "namespace": pod["metadata"]["namespace"],
        "pod_name": pod["metadata"]["name"],
        "pod_node_name": "node-1",
        "pod_phase": phase,
        "pod_container_name": container,
        "pod_container_port_name": port,
        **{
            f"pod_label_{re.sub('[^a-zA-Z0-9_]', '_', key)}": value
            for key, value in pod["metadata"]["labels"].items()
        },
    }
    return {"targets": [address], "labels": {f"__meta_kubernetes_{name}": value for name, value in meta.items()}}


def worker_pod(name: str) -> Json:
    """As the operator makes it."""
    spec = {"workers": {"replicas": 1, "template": {"spec": {"containers": [{"name": "trainer", "image": "i"}]}}}}
    times = {"creationTimestamp": "2026-01-31T12:00:00Z", "resourceVersion": "1", "generation": 1}
    job = parse_job({"metadata": {"name": "gpt", "namespace": "ml", "uid": "u", **times}, "spec": spec})
    assert job.spec is not None
    platform = Installation(sidecar_image="s", agents_url="https://operator:8443", ca_bundle="PEM")
    worker = Worker(incarnation=int(name.rpartition("-w")[2]), batch=0)
    return pod(job, job.spec, worker, platform)


OPERATOR_POD: Json = {
    "metadata": {
        "name": "holdfast-0",
        "namespace": "holdfast-system",
        "labels": {"app.kubernetes.io/name": "holdfast", "app.kubernetes.io/component": "operator"},
    },
    "spec": {"containers": [{"name": "operator", "ports": [{"name": "http"}]}]},
}
NOWHERE = "127.0.0.1:9"
DECOYS: list[Json] = [
    _pod(worker_pod("gpt-w9"), "holdfast-sidecar", NOWHERE, phase="Failed"),
    {"targets": [NOWHERE], "labels": {"__meta_kubernetes_pod_container_port_name": "http"}},
]
"""What is not to be scraped: a worker that has ended, and somebody else's pod."""


def _serve(page: Callable[[], bytes], stack: ExitStack) -> str:
    server = Server("127.0.0.1", 0, {"/metrics": metrics_page(page)})
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    return f"127.0.0.1:{server.port}"
