"""From a metric of a node through a real Prometheus and Alertmanager to a drained node, with training going on."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from threading import Thread
from typing import Any

import pytest
import yaml

from holdfast_testbed.cluster import Cluster
from holdfast_testbed.drill.faults import OPERATOR_NAMESPACE, Drill, Stage, leader
from holdfast_testbed.drill.install import install_chart
from holdfast_testbed.drill.judge import Promise, losses_and_causes
from holdfast_testbed.monitoring import alertmanager, prometheus

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "how-to" / "node-remediation.md"
RULES = ROOT / "charts" / "holdfast" / "rules" / "holdfast.yaml"
TOKEN = "a-token-of-the-drill"
ALERT = "nodeRemediation.alerts[0]"
VALUES = (
    "nodeRemediation.mode=Drain",
    "nodeRemediation.token.secretName=alerts",
    "nodeRemediation.maxUnavailable=1",
    "nodeRemediation.releaseAfterSeconds=1",
    f"{ALERT}.alert=HoldfastGpuXid,{ALERT}.action=Drain",
)


class Exporter(ThreadingTCPServer):
    """DCGM's exporter, as far as one gauge goes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Page)
        self.xids: dict[str, int] = {}

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def page(self) -> str:
        lines = (
            f'DCGM_FI_DEV_XID_ERRORS{{gpu="0",UUID="GPU-{node}",Hostname="{node}"}} {xid}'
            for node, xid in self.xids.items()
        )
        return "# TYPE DCGM_FI_DEV_XID_ERRORS gauge\n" + "\n".join(lines) + "\n"


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Exporter)
        body = self.server.page().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@contextmanager
def exporter() -> Iterator[Exporter]:
    with Exporter() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def draining(cluster: Cluster) -> Iterator[None]:
    """The chart with node remediation on; as it was afterwards."""
    secret = ("-n", OPERATOR_NAMESPACE, "create", "secret", "generic", "alerts", f"--from-literal=token={TOKEN}")
    cluster.kubectl(*secret)
    try:
        install_chart(cluster, *VALUES)
        yield
    finally:
        install_chart(cluster)
        cluster.kubectl("-n", OPERATOR_NAMESPACE, "delete", "secret", "alerts")


def guides_config(cluster: Cluster, folder: Path) -> dict[str, Any]:
    """The guide's alertmanager.yml, with the operator's address and the files of this machine."""
    texts = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    config: dict[str, Any] = next(parsed for parsed in map(yaml.safe_load, texts) if "receivers" in parsed)
    shown = json.loads(cluster.kubectl("-n", OPERATOR_NAMESPACE, "get", "secret", "holdfast-ca", "-o", "json"))
    (folder / "ca.crt").write_bytes(base64.b64decode(shown["data"]["ca.crt"]))
    (folder / "token").write_text(TOKEN)
    (hook,) = config["receivers"][1]["webhook_configs"]
    host = hook["url"].split("/")[2].rpartition(":")[0]
    hook["url"] = hook["url"].replace(host, operator_address(cluster))
    hook["http_config"]["tls_config"] = {"ca_file": str(folder / "ca.crt"), "server_name": host}
    hook["http_config"]["authorization"]["credentials_file"] = str(folder / "token")
    config["route"]["routes"][0]["group_interval"] = "1s"
    return config


def operator_address(cluster: Cluster) -> str:
    """The pod's own: cluster IPs cannot be reached from outside."""
    return str(leader(cluster)["status"]["podIP"])


@contextmanager
def monitored(cluster: Cluster, folder: Path) -> Iterator[Exporter]:
    """An exporter, Prometheus with the shipped rules, and Alertmanager with the guide's configuration."""
    with ExitStack() as stack:
        source = stack.enter_context(exporter())
        manager = stack.enter_context(alertmanager(folder, guides_config(cluster, folder)))
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "dcgm", "static_configs": [{"targets": [source.target]}]}],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [manager.url.removeprefix("http://")]}]}]},
        }
        server = stack.enter_context(prometheus(folder, config))
        source.xids["somewhere-else"] = 0
        deadline = time.monotonic() + 240
        while not server.get("/api/v1/alertmanagers")["data"]["activeAlertmanagers"] or not server.query("up == 1"):
            assert time.monotonic() < deadline, "Prometheus finds its exporter and Alertmanager"
            time.sleep(0.2)
        yield source


def test_a_metric_of_a_node_empties_it_and_no_step_is_lost(
    cluster: Cluster, draining: None, running_job: Callable[..., Any], tmp_path: Path
) -> None:
    job = running_job(spread=True)
    stage: Stage = job.stage
    watcher = stage.watcher
    hosts = operator_node(cluster)
    sick = next(pod for pod in reversed(stage.workers()) if pod.node != hosts)
    with monitored(cluster, tmp_path) as source:
        begun = time.monotonic()

        def fall_off_the_bus(stage: Stage) -> None:
            source.xids[sick.node] = 79
            stage.say(f"a GPU of {sick.node} falls off the bus ({sick.name} runs there)")

        promise = Promise(fault="a sick GPU", within_seconds=15, max_lost_steps=0, cause="Interruption")
        outcome = Drill(name="sick node", promise=promise, inflict=fall_off_the_bus).run(stage)

        def moved() -> bool:
            now = stage.workers()
            return len(now) == 3 and all(pod.node != sick.node for pod in now) and world_of_three(stage, outcome)

        watcher.wait("three workers train, none on the sick node", moved, timeout=240)
        all_three = time.monotonic() - begun
        print(f"first step without it after {outcome.resumed_seconds:.1f} s, all three after {all_three:.1f} s")
        assert losses_and_causes(promise, outcome) == ()
        assert sum(job.counted.values()) == 1
        watcher.wait("the node is drained", lambda: "NodeDrained" in told(cluster, sick.node), timeout=240)
        assert unschedulable(cluster, sick.node)
        source.xids[sick.node] = 0
        watcher.wait("the node is given back", lambda: not unschedulable(cluster, sick.node), timeout=240)


def world_of_three(stage: Stage, outcome: Any) -> bool:
    newest = stage.watcher.newest()
    return newest is not None and newest.workers == 3 and newest.pair > outcome.before


def operator_node(cluster: Cluster) -> str:
    return str(leader(cluster)["spec"]["nodeName"])


def told(cluster: Cluster, node: str) -> str:
    about = f"involvedObject.name={node}"
    return cluster.kubectl("get", "events", "--field-selector", about, "-o", "jsonpath={.items[*].reason}")


def unschedulable(cluster: Cluster, node: str) -> bool:
    return cluster.kubectl("get", "node", node, "-o", "jsonpath={.spec.unschedulable}").strip() == "true"
