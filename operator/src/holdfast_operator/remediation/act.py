"""All writes of a remediation pass: first the history, then each node's actions in order, then events and metrics.

A node's mark is written on the version that was read, so no other change of the node is overwritten.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.reasons import NodeReason
from holdfast_operator.api.times import format_time
from holdfast_operator.cluster.client import Cluster
from holdfast_operator.cluster.events import event_manifest
from holdfast_operator.errors import BlockedError, CloudError, ClusterError, ConflictError
from holdfast_operator.remediation.clouds import Cloud
from holdfast_operator.remediation.fleet import HistoryEntry, Node
from holdfast_operator.remediation.metrics import RemediationMetrics
from holdfast_operator.remediation.plan import Action, Decision, Evict, Plan, Release, SetMark, Terminate

logger = logging.getLogger(__name__)


class Actor:
    """Executes plans. ``identity`` names this process in events."""

    def __init__(
        self, *, cluster: Cluster, cloud: Cloud, metrics: RemediationMetrics, namespace: str, identity: str
    ) -> None:
        self._cluster = cluster
        self._cloud = cloud
        self._metrics = metrics
        self._namespace = namespace
        self._identity = identity
        self._told: dict[str, tuple[str, str]] = {}

    def carry_out(self, plan: Plan, known: tuple[HistoryEntry, ...], now: datetime) -> None:
        """Execute a plan and report it. Raises ``ClusterError`` if a part must be repeated."""
        if plan.history != known and plan.actions:
            self._cluster.apply_config_map(self._namespace, c.REMEDIATION_HISTORY, {"history": _lines(plan.history)})
        failed: dict[str, ClusterError | CloudError] = {}
        refused: dict[str, ClusterError] = {}
        for action in plan.actions:
            if action.machine.name not in failed:
                self._try(action, failed, refused)
        for decision in plan.decisions:
            error = failed.get(decision.node)
            if error is None and decision.node in refused:
                words = f"{decision.message}; an eviction failed: {refused[decision.node]}"
                self._tell(replace(decision, message=words, warning=True), now)
            elif error is None:
                self._tell(decision, now)
            elif isinstance(error, CloudError):
                self._tell(replace(decision, reason=NodeReason.REPLACE_FAILED, message=str(error)), now)
        for error in failed.values():
            if isinstance(error, ClusterError):
                raise error

    def forget_all_but(self, nodes: set[str]) -> None:
        """Forget nodes without a decision. Their next decision is new."""
        self._told = {node: words for node, words in self._told.items() if node in nodes}

    def _try(
        self, action: Action, failed: dict[str, ClusterError | CloudError], refused: dict[str, ClusterError]
    ) -> None:
        name, what = action.machine.name, type(action).__name__
        try:
            self._do(action)
            self._metrics.acted(what, "ok")
        except BlockedError as error:
            # The disruption budget decides until the deadline. The next pass tries again.
            logger.info("%s", error)
            self._metrics.acted(what, "blocked")
        except (CloudError, ClusterError) as error:
            self._metrics.acted(what, "conflict" if isinstance(error, ConflictError) else "failed")
            if isinstance(action, Evict) and isinstance(error, ClusterError):
                # A pod that stays does not delay the eviction of others. The next pass tries again.
                refused.setdefault(name, error)
            else:
                failed[name] = error

    def _do(self, action: Action) -> None:
        match action:
            case SetMark():
                changes: dict[str, Any] = {"spec": {"unschedulable": True}} if action.cordon else {}
                self._patch(action.machine, action.mark.to_json(), changes)
            case Release():
                self._patch(action.machine, None, {"spec": {"unschedulable": None}} if action.uncordon else {})
            case Evict():
                pod = action.pod
                if action.force:
                    self._cluster.delete_pod(pod.namespace, pod.name, pod.uid)
                else:
                    self._cluster.evict(pod.namespace, pod.name, pod.uid)
            case Terminate():
                logger.warning("node %s: %s", action.machine.name, self._cloud.replace(action.machine.provider_id))

    def _patch(self, machine: Node, mark: str | None, changes: Mapping[str, Any]) -> None:
        meta = {
            "uid": machine.uid,
            "resourceVersion": machine.version,
            "annotations": {c.ANNOTATION_REMEDIATION: mark},
        }
        self._cluster.patch_node(machine.name, {"metadata": meta, **changes})

    def _tell(self, decision: Decision, now: datetime) -> None:
        """Write an event and a log line if the message is new."""
        words = (decision.reason, decision.message)
        if self._told.get(decision.node) == words:
            return
        self._told[decision.node] = words
        level = logging.WARNING if decision.warning else logging.INFO
        logger.log(level, "node %s: %s: %s", decision.node, decision.reason, decision.message)
        self._metrics.decided(decision.reason)
        try:
            self._cluster.tell(node_event(decision, now, self._identity))
        except ClusterError as error:
            logger.warning("an event was not written: %s", error)


def node_event(decision: Decision, now: datetime, identity: str) -> dict[str, Any]:
    """Return the manifest of an event about a node."""
    return event_manifest(
        {"apiVersion": "v1", "kind": "Node", "name": decision.node, "uid": decision.uid},
        action="Remediate",
        reason=decision.reason,
        message=decision.message,
        warning=decision.warning,
        now=now,
        identity=identity,
    )


def _lines(history: tuple[HistoryEntry, ...]) -> str:
    values = (
        {
            "node": entry.node,
            "uid": entry.uid,
            "started": format_time(entry.started),
            "ended": format_time(entry.ended),
        }
        for entry in history
    )
    return "\n".join(json.dumps(value, separators=(",", ":")) for value in values)
