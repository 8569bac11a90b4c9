"""A cluster and a cloud around one remediation controller, which may crash at any write."""

from __future__ import annotations

import copy
import json
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from holdfast_operator.api.node_mark import Mode
from holdfast_operator.cluster.cache import Cache
from holdfast_operator.errors import BlockedError, CloudError, ClusterError, ConflictError
from holdfast_operator.remediation.controller import Controller
from holdfast_operator.remediation.metrics import RemediationMetrics
from holdfast_operator.remediation.settings import AlertRule, NodeLimit, RemediationSettings

START = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
MARK = "holdfast.dev/remediation"


Body = dict[str, Any]


class Crash(BaseException):
    """The operator dies."""


class FakeCluster:
    """Nodes with versions, pods, budgets, and a log of all writes. ``crash_after`` so many writes it dies."""

    def __init__(self, *names: str) -> None:
        self.nodes: dict[str, Body] = {}
        self.pods: dict[str, Body] = {}
        self.protected: set[str] = set()
        self.configmaps: dict[str, dict[str, str]] = {}
        self.events: list[Body] = []
        self.writes: list[str] = []
        self.crash_after: int | None = None
        self.down = False
        for name in names:
            self.nodes[name] = {
                "metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": "1"},
                "spec": {"providerID": f"aws:///us-east-1a/{name}"},
                "status": {"conditions": [{"type": "Ready", "status": "True"}]},
            }

    def add_pod(self, name: str, node: str, *, kind: str = "ReplicaSet", **change: Any) -> None:
        owner = [{"kind": kind, "apiVersion": "apps/v1", "name": "web", "uid": "o", "controller": True}]
        meta = {"name": name, "namespace": "ml", "uid": f"uid-{name}", "ownerReferences": owner if kind else []}
        self.pods[name] = {"metadata": meta, "spec": {"nodeName": node}, "status": {"phase": "Running"}, **change}

    # What Cluster has

    def node(self, name: str) -> Body | None:
        if self.down:
            raise ClusterError("no API server")
        return copy.deepcopy(self.nodes.get(name))

    def pods_on(self, node: str) -> list[Body]:
        return [copy.deepcopy(pod) for pod in self.pods.values() if pod["spec"]["nodeName"] == node]

    def config_map(self, _namespace: str, name: str) -> Body | None:
        return {"data": self.configmaps[name]} if name in self.configmaps else None

    def apply_config_map(self, _namespace: str, name: str, data: dict[str, str]) -> None:
        self._write(f"history {len(data['history'].splitlines())}")
        self.configmaps[name] = data

    def patch_node(self, name: str, body: Body) -> None:
        node = self.nodes[name]
        if body["metadata"]["resourceVersion"] != node["metadata"]["resourceVersion"]:
            raise ConflictError(f"{name} has changed")
        mark = body["metadata"]["annotations"][MARK]
        unschedulable = body.get("spec", {}).get("unschedulable", "as it was")
        self._write(f"{name} {json.loads(mark)['mode'] if mark else 'no mark'} unschedulable={unschedulable}")
        annotations = node["metadata"].setdefault("annotations", {})
        annotations.update({MARK: mark}) if mark else annotations.pop(MARK)
        if "spec" in body:
            node["spec"]["unschedulable"] = bool(unschedulable)
        self.touch(name)

    def touch(self, name: str) -> None:
        meta = self.nodes[name]["metadata"]
        meta["resourceVersion"] = str(int(meta["resourceVersion"]) + 1)

    def evict(self, _namespace: str, name: str, uid: str) -> None:
        assert self.pods[name]["metadata"]["uid"] == uid
        if name in self.protected:
            raise BlockedError(f"a disruption budget protects {name}")
        self._write(f"evict {name}")
        del self.pods[name]

    def delete_pod(self, _namespace: str, name: str, _uid: str) -> None:
        self._write(f"delete {name}")
        del self.pods[name]

    def tell(self, event: Body) -> None:
        self.events.append(event)

    def _write(self, what: str) -> None:
        if self.crash_after is not None:
            self.crash_after -= 1
            if self.crash_after < 0:
                raise Crash
        self.writes.append(what)


class FakeCloud:
    """Takes machines away, their Node objects with them."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.refuses = ""

    def replace(self, provider_id: str) -> str:
        if self.refuses:
            raise CloudError(self.refuses)
        name = provider_id.rpartition("/")[2]
        self.cluster._write(f"terminate {name}")
        self.cluster.nodes.pop(name, None)
        return "done"


class World:
    """A cluster and the operator's part over time; ``restart`` forgets all that is in memory.

    ``restart`` is all that makes Alertmanager tell anything twice: what it has no answer to.
    """

    def __init__(self, *names: str, **change: Any) -> None:
        self.now = START
        self.sent: dict[bytes, Future[None]] = {}
        self.cluster = FakeCluster(*names)
        self.cloud = FakeCloud(self.cluster)
        self.rules = RemediationSettings(
            **{
                "mode": Mode.REPLACE,
                "provider": "AWS",
                "alerts": (AlertRule(alert="Hot", action=Mode.DRAIN), AlertRule(alert="Dead", action=Mode.REPLACE)),
                "max_unavailable": NodeLimit(number=2),
                "max_per_hour": 10,
                "token_file": "/none",
                **change,
            }
        )
        self.jobs: list[Body] = []
        self.restart()

    def restart(self) -> None:
        self.cache = Cache()
        self.registry = CollectorRegistry()
        self.keeper = Controller(
            rules=self.rules,
            cluster=self.cluster,  # type: ignore[arg-type]
            cache=self.cache,
            metrics=RemediationMetrics(self.registry),
            cloud=self.cloud,
            namespace="holdfast-system",
            identity="op",
            clock=lambda: self.now,
        )
        for body in [body for body, answer in self.sent.items() if not answer.done()]:
            self._send(body)

    def alert(self, node: str, name: str = "Hot", status: str = "firing") -> None:
        labels = {"alertname": name, "node": node}
        alerts = [{"status": status, "labels": labels, "annotations": {}, "startsAt": START.isoformat()}]
        self._send(json.dumps({"version": "4", "alerts": alerts}).encode())

    def _send(self, body: bytes) -> None:
        self._watch()
        assert self.keeper.inbox is not None
        self.sent[body] = self.keeper.inbox.receive(body)

    def run(self, minutes: float = 0.0) -> float | None:
        self.now += timedelta(minutes=minutes)
        self._watch()
        return self.keeper.run()

    def _watch(self) -> None:
        for body in self.cluster.nodes.values():
            self.cache.put_node(copy.deepcopy(body))
        for body in self.cache.nodes():
            if body["metadata"]["name"] not in self.cluster.nodes:
                self.cache.drop_node(body)
        for job in self.jobs:
            self.cache.put_job(job)

    def reasons(self) -> list[str]:
        return [event["reason"] for event in self.cluster.events]

    def metric(self, line: str) -> bool:
        return line in generate_latest(self.registry).decode().splitlines()
