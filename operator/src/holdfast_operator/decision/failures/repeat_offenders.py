"""Nodes on which a job fails repeatedly. No new worker is placed there until the failures have aged.

Only the cause Infrastructure counts against a node, because failures of a script follow the script. The weight of
each failure halves every six hours, so an unused node becomes available again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import timedelta

from holdfast_operator.api import names as c
from holdfast_operator.api.reasons import Cause, RecoveryAction, WorkerReason
from holdfast_operator.api.status import Incident, Worker
from holdfast_operator.api.status.failure_history import NodeFailures
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures.avoided_nodes import avoided_already, avoiding
from holdfast_operator.decision.plan import DecisionMetric
from holdfast_operator.decision.reporting import messages

_MARGIN = 0.5


def offended(draft: PlanDraft, incident: Incident, worker: Worker | None) -> PlanDraft:
    """Count a failure against its node, and avoid the node if the weight reaches the limit."""
    limit = draft.spec.avoid_repeat_offenders
    node = incident.node or (worker.node if worker is not None else "")
    if not limit or not node or incident.cause != Cause.INFRASTRUCTURE or incident.action == RecoveryAction.IGNORE:
        return draft
    offender = failures_since_boot(draft, draft.status.offenders, node).plus(draft.now)
    others = [entry for entry in draft.status.offenders if entry.node != node and _matters(draft, entry)]
    newest = sorted([*others, offender], key=lambda entry: (entry.times[-1], entry.node))
    draft = draft.with_status(offenders=tuple(newest[-c.OFFENDERS_KEPT :]))
    weight = offender.weight(draft.now)
    span = until_below(weight, limit)
    if weight < limit - _MARGIN or avoided_already(draft, node, WorkerReason.REPEAT_OFFENDER, span):
        return draft
    return _avoid(draft, offender, worker or draft.some_worker(), span)


def until_below(weight: float, limit: int) -> timedelta:
    """Return how long the weight stays at or above the limit less the margin, without further failures."""
    return max(0.0, math.log2(weight / (limit - _MARGIN))) * c.OFFENCE_HALVES


def _avoid(draft: PlanDraft, offender: NodeFailures, moved: Worker, span: timedelta) -> PlanDraft:
    failures = len(offender.times)
    # Without this node the job would have no place.
    if not draft.can_place_elsewhere(offender.node, [moved]):
        message = messages.recovery.repeat_offender_still_used(offender.node, failures)
        return _said(draft, WorkerReason.REPEAT_OFFENDER_STILL_USED, message)
    message = messages.recovery.repeat_offender(offender.node, failures, span.total_seconds() / 3600)
    draft = avoiding(draft, offender.node, WorkerReason.REPEAT_OFFENDER, span)
    return _said(draft, WorkerReason.REPEAT_OFFENDER, message)


def _said(draft: PlanDraft, reason: WorkerReason, message: str) -> PlanDraft:
    word = DecisionMetric(cause=Cause.INFRASTRUCTURE, action=RecoveryAction.AVOID_NODE, reason=reason)
    return draft.with_decision_metric(word).with_event(reason, message, warning=True)


def failures_since_boot(draft: PlanDraft, entries: Iterable[NodeFailures], node: str) -> NodeFailures:
    """Return the failures that these entries record for the node since it booted."""
    view = draft.seen.node(node)
    boot_id = view.boot_id if view is not None else ""
    known = next((entry for entry in entries if entry.node == node), None)
    if known is None or (boot_id and known.boot_id and known.boot_id != boot_id):
        return NodeFailures(node=node, boot_id=boot_id)
    return known


def _matters(draft: PlanDraft, entry: NodeFailures) -> bool:
    return entry.weight(draft.now) > 1 / 16
