"""Nodes on which no new worker of a job is placed for now: nodes that failed, received a notice or are leaving.

Invariant: each reason to avoid a node expires independently of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta

from holdfast_operator.api.reasons import FailureReason
from holdfast_operator.api.status import AvoidedNode
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.views import NodeView

# For these reasons a node is avoided only while the node itself shows them.
_SHOWN: Mapping[str, Callable[[NodeView, datetime], bool]] = {
    FailureReason.NODE_LOST: lambda node, now: node.dead(now),
    FailureReason.NODE_LEAVING: lambda node, _now: bool(node.announced),
    FailureReason.NODE_REMEDIATION: lambda node, _now: node.mark is not None and node.mark.drains,
}


def avoiding(
    draft: PlanDraft,
    node: str,
    reason: str,
    span: timedelta,
    *,
    message: str = "",
    failed_checks: tuple[str, ...] = (),
) -> PlanDraft:
    """Avoid a node from now until ``span`` has passed."""
    known = ((entry.node, entry.reason, entry.failed_checks) for entry in draft.status.avoided)
    if (node, reason, failed_checks) in known:
        return draft
    view = draft.seen.node(node)
    boot_id = view.boot_id if view is not None else ""
    entry = AvoidedNode(
        node=node,
        reason=reason,
        until=draft.now + span,
        boot_id=boot_id,
        message=message,
        failed_checks=failed_checks,
    )
    order = sorted((*draft.status.avoided, entry), key=lambda item: (item.node, item.reason, item.failed_checks))
    return draft.with_status(avoided=tuple(order))


def avoided_already(draft: PlanDraft, node: str, reason: str, span: timedelta) -> bool:
    """Return whether the node is avoided for this reason, or for another lasting one for at least ``span``."""
    entries = (entry for entry in draft.status.avoided if entry.node == node and entry.required)
    here = (entry for entry in entries if entry.reason not in _SHOWN)
    return any(entry.reason == reason or entry.until >= draft.now + span for entry in here)


def apply(draft: PlanDraft) -> PlanDraft:
    """Remove entries that have expired, and those of nodes that are gone, rebooted, recovered or no longer leaving.

    A node that rebooted is a different machine with the same name, or the same machine after its repair.
    """
    return draft.with_status(avoided=tuple(entry for entry in draft.status.avoided if _still(draft, entry)))


def _still(draft: PlanDraft, entry: AvoidedNode) -> bool:
    node = draft.seen.node(entry.node)
    if node is None or draft.now >= entry.until:
        return False
    if entry.boot_id and node.boot_id and node.boot_id != entry.boot_id:
        return False
    shown = _SHOWN.get(entry.reason)
    return shown is None or shown(node, draft.now)
