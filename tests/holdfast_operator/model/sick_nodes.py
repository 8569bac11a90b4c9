"""Sick nodes, alerts about them, and the plan that remediation makes."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from holdfast_operator.api.node_mark import Mark, Mode
from holdfast_operator.remediation.alerts import Alert
from holdfast_operator.remediation.decide import remedy
from holdfast_operator.remediation.fleet import FleetSnapshot, HistoryEntry, Node, NodePod
from holdfast_operator.remediation.plan import Decision, Plan
from holdfast_operator.remediation.settings import NodeLimit, RemediationSettings

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
MANY = NodeLimit(number=100)


def rules(**change: Any) -> RemediationSettings:
    return RemediationSettings(
        **{"mode": Mode.DRAIN, "max_unavailable": MANY, "max_per_hour": 100, "provider": "AWS", **change}
    )


def alert(
    node: str = "n0", mode: Mode = Mode.DRAIN, *, name: str = "Hot", firing: bool = True, **change: Any
) -> Alert:
    facts = {"node": node, "name": name, "mode": mode, "firing": firing, "started": NOW, "heard": NOW, **change}
    return Alert(fingerprint=f"{name}-{node}", **facts)


def machine(name: str = "n0", **change: Any) -> Node:
    return Node(**{"name": name, "uid": f"uid-{name}", "version": "1", "provider_id": "aws:///x", **change})


def marked(name: str = "n0", mode: Mode = Mode.DRAIN, *, pods: Iterable[NodePod] = (), **mark: Any) -> Node:
    since = {"since": NOW - MINUTE, "draining_since": NOW - MINUTE if mode >= Mode.DRAIN else None}
    made = Mark(**{"mode": mode, "message": "alert Hot", "alerts": (f"Hot-{name}",), **since, **mark})
    return machine(name, unschedulable=True, mark=made, marked=True, pods=tuple(pods))


def pod(name: str = "p", **change: Any) -> NodePod:
    return NodePod(**{"namespace": "ml", "name": name, "uid": f"uid-{name}", **change})


def plan(
    *machines: Node,
    alerts: Iterable[Alert] = (),
    now: datetime = NOW,
    history: Iterable[HistoryEntry] = (),
    **change: Any,
) -> Plan:
    return remedy(
        FleetSnapshot(rules=rules(**change), alerts=tuple(alerts), machines=machines, history=tuple(history)), now
    )


def reasons(made: Plan) -> list[str]:
    return [decision.reason for decision in made.decisions]


def only(made: Plan) -> Decision:
    (decision,) = made.decisions
    return decision
