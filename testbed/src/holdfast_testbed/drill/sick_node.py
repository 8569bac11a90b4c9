"""A faulty node with its monitoring, and the chart with node remediation.

The monitoring is DCGM's exporter, a real Prometheus with the shipped rules, and a real Alertmanager as in the guide.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from threading import Thread
from typing import TYPE_CHECKING, Any, cast

import yaml

from holdfast_testbed.constants import OPERATOR_NAMESPACE
from holdfast_testbed.drill.faults import leader
from holdfast_testbed.drill.install import REPOSITORY, install_chart
from holdfast_testbed.fakes.chart import CHART
from holdfast_testbed.fakes.monitoring import alertmanager, prometheus
from holdfast_testbed.waiting import wait_for

if TYPE_CHECKING:
    from holdfast_testbed.cluster.cluster import Cluster

OFF_THE_BUS = 79
"""The XID of a GPU that does not respond."""
GUIDE = REPOSITORY / "docs" / "how-to" / "node-remediation.md"
RULES = CHART / "rules" / "holdfast.yaml"
TOKEN = "a-token-of-the-drill"  # noqa: S105 - of a cluster that ends with the drill
_ALERT = "nodeRemediation.alerts[0]"
_VALUES = (
    "nodeRemediation.mode=Drain",
    "nodeRemediation.token.secretName=alerts",
    "nodeRemediation.maxUnavailable=1",
    "nodeRemediation.releaseAfterSeconds=1",
    "nodeRemediation.maxPerHour=1000",
    "nodeRemediation.cooldownSeconds=1",
    f"{_ALERT}.alert=HoldfastGpuXid,{_ALERT}.action=Drain",
)


class Exporter(ThreadingTCPServer):
    """DCGM's exporter with one gauge."""

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
        exporter = cast("Exporter", self.server)
        body = exporter.page().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextmanager
def remediating(cluster: Cluster) -> Iterator[None]:
    """Install the chart with node remediation, and restore the previous values afterwards."""
    secret = ("-n", OPERATOR_NAMESPACE, "create", "secret", "generic", "alerts", f"--from-literal=token={TOKEN}")
    cluster.kubectl(*secret)
    try:
        install_chart(cluster, *_VALUES)
        yield
    finally:
        install_chart(cluster)
        cluster.kubectl("-n", OPERATOR_NAMESPACE, "delete", "secret", "alerts")


@contextmanager
def monitored(cluster: Cluster, folder: Path) -> Iterator[Exporter]:
    """Start an exporter, Prometheus and Alertmanager, connected; scraped and evaluated each second."""
    with ExitStack() as stack:
        source = stack.enter_context(_exporter())
        manager = stack.enter_context(alertmanager(folder, _guides_config(cluster, folder)))
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "dcgm-exporter", "static_configs": [{"targets": [source.target]}]}],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [manager.url.removeprefix("http://")]}]}]},
        }
        server = stack.enter_context(prometheus(folder, config))
        source.xids["somewhere-else"] = 0

        def whole() -> bool:
            found = server.get("/api/v1/alertmanagers")["data"]["activeAlertmanagers"]
            return bool(found and server.query("up == 1"))

        wait_for(whole, what="Prometheus finds its exporter and Alertmanager", seconds=240)
        yield source


@contextmanager
def _exporter() -> Iterator[Exporter]:
    with Exporter() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def _guides_config(cluster: Cluster, folder: Path) -> dict[str, Any]:
    """Return the guide's alertmanager.yml with the operator's address and the files of this machine."""
    texts = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    config: dict[str, Any] = next(parsed for parsed in map(yaml.safe_load, texts) if "receivers" in parsed)
    shown = json.loads(cluster.kubectl("-n", OPERATOR_NAMESPACE, "get", "secret", "holdfast-ca", "-o", "json"))
    (folder / "ca.crt").write_bytes(base64.b64decode(shown["data"]["ca.crt"]))
    (folder / "token").write_text(TOKEN)
    (hook,) = config["receivers"][1]["webhook_configs"]
    host = hook["url"].split("/")[2].rpartition(":")[0]
    # The pod's own address, because cluster IPs cannot be reached from outside.
    hook["url"] = hook["url"].replace(host, str(leader(cluster)["status"]["podIP"]))
    hook["http_config"]["tls_config"] = {"ca_file": str(folder / "ca.crt"), "server_name": host}
    hook["http_config"]["authorization"]["credentials_file"] = str(folder / "token")
    config["route"]["routes"][0]["group_interval"] = "1s"
    return config


def unschedulable(cluster: Cluster, node: str) -> bool:
    """Return whether the node is cordoned."""
    return cluster.kubectl("get", "node", node, "-o", "jsonpath={.spec.unschedulable}").strip() == "true"
