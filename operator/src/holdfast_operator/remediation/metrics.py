"""The metrics of node remediation, in the operator's registry. ``docs/reference/metrics.md`` documents them."""

from __future__ import annotations

from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge

from holdfast_operator.api.node_mark import Mode
from holdfast_operator.api.reasons import NodeReason
from holdfast_operator.remediation.fleet import FleetSnapshot
from holdfast_operator.remediation.inbox import RESULTS
from holdfast_operator.remediation.settings import RemediationSettings


class RemediationMetrics:
    """Thread-safe, as prometheus-client is."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._alerts = Counter(
            "holdfast_remediation_alerts", "Alerts from Alertmanager, by result.", ["result"], registry=registry
        )
        self._decisions = Counter(
            "holdfast_remediation_decisions", "Decisions about nodes, by reason.", ["reason"], registry=registry
        )
        self._actions = Counter(
            "holdfast_remediation_actions",
            "Actions on nodes, by action and result.",
            ["action", "result"],
            registry=registry,
        )
        self._marked = Gauge(
            "holdfast_remediation_nodes", "Nodes with Holdfast's mark, by mode.", ["mode"], registry=registry
        )
        for result in RESULTS:
            self._alerts.labels(result)
        self.seen(FleetSnapshot(rules=RemediationSettings()))

    def alerts(self, result: str, number: int) -> None:
        self._alerts.labels(result).inc(number)

    def decided(self, reason: str) -> None:
        """Count a new decision about a node."""
        self._decisions.labels(reason).inc()

    def acted(self, action: str, result: str) -> None:
        self._actions.labels(action, result).inc()

    def seen(self, sight: FleetSnapshot) -> None:
        """Count the marked nodes by mode. A node that an administrator un-cordoned has its own value."""
        marks = [machine.mark for machine in sight.machines if machine.mark is not None]
        tally = Tally(NodeReason.UNCORDONED_EXTERNALLY if mark.overruled else mark.mode.word for mark in marks)
        for word in (*(mode.word for mode in Mode if mode is not Mode.OBSERVE), NodeReason.UNCORDONED_EXTERNALLY):
            self._marked.labels(word).set(tally[word])
