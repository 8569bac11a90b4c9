"""Nodes that fail a job again and again: no new worker of it is placed there until that is long enough ago.

Only Infrastructure counts against a node: a script's own failures follow the script. Each failure weighs half as much
after each six hours, so a node that is left alone becomes good again by itself.
"""

from __future__ import annotations

import math
from datetime import timedelta

from holdfast_operator.api import names as c
from holdfast_operator.api.status import Incident, Worker
from holdfast_operator.api.status.failure_history import NodeFailures
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures.avoided_nodes import avoided_already, avoiding
from holdfast_operator.decision.plan import DecisionMetric

REASON = "RepeatOffender"
KEPT = "RepeatOffenderKept"
_MARGIN = 0.5


def offended(draft: PlanDraft, incident: Incident, worker: Worker | None) -> PlanDraft:
    """Hold a failure against its node, and avoid the node if that was one too many."""
    limit = draft.spec.avoid_repeat_offenders
    node = incident.node or (worker.node if worker is not None else "")
    if not limit or not node or incident.cause != c.CAUSE_INFRASTRUCTURE or incident.action == c.IGNORE:
        return draft
    offender = _known(draft, node).plus(draft.now)
    others = [entry for entry in draft.status.offenders if entry.node != node and _matters(draft, entry)]
    newest = sorted([*others, offender], key=lambda entry: (entry.times[-1], entry.node))
    draft = draft.with_status(offenders=tuple(newest[-c.OFFENDERS_KEPT :]))
    weight = offender.weight(draft.now)
    span = until_below(weight, limit)
    if weight < limit - _MARGIN or avoided_already(draft, node, REASON, span):
        return draft
    return _avoid(draft, offender, worker or draft.some_worker(), span)


def until_below(weight: float, limit: int) -> timedelta:
    """How long a weight stays at or above the limit, less the margin, if nothing is added."""
    return max(0.0, math.log2(weight / (limit - _MARGIN))) * c.OFFENCE_HALVES


def _avoid(draft: PlanDraft, offender: NodeFailures, moved: Worker, span: timedelta) -> PlanDraft:
    count = len(offender.times)
    times = "1 time" if count == 1 else f"{count} times"
    message = f"node {offender.node} failed this job {times}"
    # One avoided node too many would leave the job without a place.
    if not draft.can_place_elsewhere(offender.node, [moved]):
        told = f"{message}; it is used all the same, since no other node has room for a worker"
        return _said(draft, KEPT, told)
    told = f"{message}; no worker is placed there for {span.total_seconds() / 3600:.1f} h"
    return _said(avoiding(draft, offender.node, REASON, span), REASON, told)


def _said(draft: PlanDraft, reason: str, message: str) -> PlanDraft:
    word = DecisionMetric(cause=c.CAUSE_INFRASTRUCTURE, action="AvoidNode", reason=reason)
    return draft.with_decision_metric(word).with_event(reason, message, warning=True)


def _known(draft: PlanDraft, node: str) -> NodeFailures:
    """What is held against the node since it booted."""
    view = draft.seen.node(node)
    boot_id = view.boot_id if view is not None else ""
    known = next((entry for entry in draft.status.offenders if entry.node == node), None)
    if known is None or (boot_id and known.boot_id and known.boot_id != boot_id):
        return NodeFailures(node=node, boot_id=boot_id)
    return known


def _matters(draft: PlanDraft, entry: NodeFailures) -> bool:
    return entry.weight(draft.now) > 1 / 16
