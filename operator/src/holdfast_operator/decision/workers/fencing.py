"""Workers that are proved gone: they cannot run again, whatever the network does (docs/reference/protocol.md,
Membership, 5).

Silence and absence prove nothing. A pod whose object is gone has ended if its node's kubelet was connected for the
whole time that it has to end it. A renewed Lease alone does not show this: after a partition the kubelet renews it
first and learns of the deletion later, and it renews it also while the container runtime hangs. A pod that reports is
never proved gone.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import datetime, timedelta

from holdfast_operator.api import names as c
from holdfast_operator.api.status import Phase, Worker
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.views import NodeView, PodView

logger = logging.getLogger(__name__)


def apply(draft: PlanDraft) -> PlanDraft:
    """Move proved workers from Lost (or Leaving) to Ended."""
    for worker in draft.status.in_phase(Phase.LOST, Phase.LEAVING):
        if _proved(draft, worker):
            draft = draft.with_worker(replace(worker, phase=Phase.ENDED, since=draft.now))
        elif worker.absent_since is not None:
            draft = draft.requeue_in(c.LEASE_READ)
    return draft


def _proved(draft: PlanDraft, worker: Worker) -> bool:
    if not worker.known or not worker.node:
        return worker.absent_since is not None and not worker.node
    return _shown_gone(draft, worker) and not _reports(draft, worker)


def _shown_gone(draft: PlanDraft, worker: Worker) -> bool:
    node = draft.node(worker)
    if node is None or node.out_of_service:
        return True
    if worker.boot_id and node.boot_id and node.boot_id != worker.boot_id:
        return True
    return worker.absent_since is not None and _ended_by_kubelet(draft, worker, node, worker.absent_since)


def _reports(draft: PlanDraft, worker: Worker) -> bool:
    """Return whether the pod reported a moment ago, regardless of proofs that it ended."""
    own = draft.seen.report(worker.pod_uid)
    if own is None or draft.now - own.received_at > c.REPORTS_NOW:
        return False
    logger.warning(
        "%s-w%d reports although node %s proves that it ended: it is not taken for gone",
        draft.seen.job.name,
        worker.incarnation,
        worker.node,
    )
    return True


def _ended_by_kubelet(draft: PlanDraft, worker: Worker, node: NodeView, absent_since: datetime) -> bool:
    """Return whether the kubelet was connected for long enough to end the pod, and renewed its Lease once more."""
    row = node.renewals
    if not node.ready or row is None or row.since is None or row.first_at is None or _trains(draft, worker):
        return False
    extra = _extra(worker, unbroken=row.since <= absent_since + 2 * c.LEASE_READ)
    grace = timedelta(seconds=worker.grace_seconds)
    due = max(row.first_at, absent_since) + extra + grace + c.GONE_MARGIN
    own = draft.seen.report(worker.pod_uid)
    if own is not None:
        due = max(due, own.received_at + c.GONE_MARGIN)
    if row.at <= due:
        return False
    return not extra or (node.heartbeat is not None and row.first is not None and node.heartbeat > row.first)


def _extra(worker: Worker, *, unbroken: bool) -> timedelta:
    """Return how much longer a kubelet may take than the pod's grace period.

    A pod that was still there after the deadline of its deletion shows a runtime that does not end containers.
    """
    if not worker.left_in_time:
        return c.AFTER_HANG
    return timedelta(0) if unbroken else c.AFTER_GAP


def left_in_time(draft: PlanDraft, worker: Worker, pod: PodView | None, absent_since: datetime) -> bool:
    """Return whether the pod vanished before or soon after the deadline of its deletion.

    If its last state is not known, the earliest possible deadline counts: the last time at which the status shows
    that none had passed.
    """
    if pod is not None and pod.deleted_at is None:
        return True
    deadline = pod.deleted_at if pod is not None else _last_known(draft, worker)
    return deadline is not None and absent_since <= deadline + c.GONE_MARGIN


def _last_known(draft: PlanDraft, worker: Worker) -> datetime | None:
    """Return when the status last showed that the pod was there and that no deadline had passed."""
    if worker.phase is Phase.LEAVING:
        return worker.since
    progress = draft.status.progress
    return progress.time if progress is not None and worker.phase is Phase.WANTED else None


def _trains(draft: PlanDraft, worker: Worker) -> bool:
    """Return whether a peer that reports is in a world with it."""
    worlds = (report.world for report in draft.seen.reports if report.fresh(draft.now))
    return any(world is not None and worker.pod_uid in world.members for world in worlds)


def proved_gone(draft: PlanDraft) -> frozenset[str]:
    """Return the UIDs of pods that can never train again."""
    return frozenset(worker.pod_uid for worker in draft.status.in_phase(Phase.ENDED) if worker.known)
