"""What Alertmanager sends, and an inbox that takes it."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from holdfast_operator.api.node_mark import Mode
from holdfast_operator.remediation.inbox import Inbox
from holdfast_operator.remediation.settings import AlertRule, RemediationSettings

TOKEN = "good"
NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
RULES = RemediationSettings(
    mode=Mode.DRAIN,
    alerts=(
        AlertRule(alert="Xid", action=Mode.REPLACE, labels=(("xid", "79"),)),
        AlertRule(alert="Xid", action=Mode.CORDON),
        AlertRule(alert="Hot", action=Mode.DRAIN),
    ),
)


def node(name: str, *addresses: str) -> dict[str, Any]:
    listed = [{"type": "InternalIP", "address": address} for address in addresses]
    return {"metadata": {"name": name}, "status": {"addresses": listed}}


NODES = [node("n0", "10.0.0.1", "fd00::1"), node("n1", "10.0.0.2", "host-1")]


def told(status: str = "firing", *, started: datetime = NOW, summary: str = "", **labels: str) -> dict[str, Any]:
    return {
        "status": status,
        "labels": {"alertname": "Hot", "node": "n0", **labels},
        "annotations": {"summary": summary} if summary else {},
        "startsAt": started.isoformat(),
        "endsAt": "0001-01-01T00:00:00Z",
        "generatorURL": "http://prometheus/graph",
        "fingerprint": "f" * 16,
    }


def body(*alerts: Any, **change: Any) -> bytes:
    return json.dumps({"version": "4", "groupKey": "{}", "truncatedAlerts": 0, "alerts": alerts, **change}).encode()


@dataclass
class Box:
    """An inbox and what it told others, which carry it out at once, or ``idle`` not at all."""

    now: datetime = NOW
    idle: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    woken: int = 0
    nodes: list[dict[str, Any]] = field(default_factory=lambda: list(NODES))
    tokens: tuple[bytes, ...] = (TOKEN.encode(),)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.inbox = Inbox(
            RULES,
            nodes=lambda: list(self.nodes),
            exists=lambda name: any(body["metadata"]["name"] == name for body in self.nodes),
            tokens=lambda: self.tokens,
            wake=self._wake,
            counted=self._count,
            clock=lambda: self.now,
        )

    def _wake(self) -> None:
        self.woken += 1
        if not self.idle:
            self.inbox.carried_out(self.inbox.words())

    def _count(self, result: str, number: int) -> None:
        with self._lock:
            self.counts[result] += number

    def send(self, *alerts: Any, **change: Any) -> list[tuple[str, str, str, bool]]:
        self.inbox.receive(body(*alerts, **change))
        return sorted((a.node, a.name, a.mode.word, a.firing) for a in self.inbox.alerts())
