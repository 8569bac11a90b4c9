"""Nodes on which no new worker of a job is placed for now: dead, noticed, about to go.

Invariant: each reason to avoid a node lasts on its own, whichever others come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta

from holdfast_operator.api.reasons import FailureReason
from holdfast_operator.api.status import AvoidedNode
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.views import NodeView

# Why a node is avoided only as long as it shows it.
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
    """Avoid a node from now on, for a while."""
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
    """For this reason, or as long for another one that does not pass sooner."""
    entries = (entry for entry in draft.status.avoided if entry.node == node and entry.required)
    here = (entry for entry in entries if entry.reason not in _SHOWN)
    return any(entry.reason == reason or entry.until >= draft.now + span for entry in here)


def apply(draft: PlanDraft) -> PlanDraft:
    """Forget nodes whose time is over, that are gone or booted since, were dead and live again, or stay after all.

    A node that booted since is another machine under the same name, or the same after its repair.
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
