"""Delete pods that must go, and remove workers that are no longer needed from the status.

The operator deletes a pod only if no world trains with it, for one of these reasons:
- it was ordered away, or did not leave in time
- it is lost to a running world, hangs or is unreachable
- it has ended and is not among the few that are kept for their logs
"""

from __future__ import annotations

from datetime import timedelta

from holdfast_operator.api import names as c
from holdfast_operator.api.reasons import FailureReason
from holdfast_operator.api.status import Phase, Worker
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.lifecycle.finished import SIDE_CONTAINER
from holdfast_operator.decision.plan import DeletePod
from holdfast_operator.decision.reporting.progress import newest_report
from holdfast_operator.views import PodView


def apply(draft: PlanDraft) -> PlanDraft:
    for worker in draft.status.in_phase(Phase.LEAVING):
        draft = _leaving(draft, worker)
    for worker in draft.status.in_phase(Phase.LOST):
        draft = _lost(draft, worker)
    for worker in draft.status.in_phase(Phase.ENDED):
        draft = _outlasted(draft, worker)
    for worker in _spent(draft):
        draft = _delete(draft, worker, "it has ended")
    kept = tuple(worker for worker in draft.status.workers if not _forgettable(draft, worker))
    return draft.with_status(workers=kept)


def _leaving(draft: PlanDraft, worker: Worker) -> PlanDraft:
    """Delete a leaving pod; one with a ready launcher first gets time to drain."""
    if not worker.known:
        return draft
    drains = draft.spec.launched and worker.pod_uid in draft.status.membership.named() and worker.ready_at is not None
    if not drains:
        return _delete(draft, worker, worker.reason)
    margin = timedelta(seconds=draft.spec.drain_seconds) + c.DRAIN_MARGIN
    deadline = (worker.since or draft.now) + margin
    if draft.now < deadline:
        return draft.requeue_at(deadline)
    return _delete(draft, worker, f"{worker.reason}: it did not leave by itself")


def _lost(draft: PlanDraft, worker: Worker) -> PlanDraft:
    # With ``Wait``, an unreachable worker may return.
    severed = worker.reason == FailureReason.POD_UNREACHABLE and draft.spec.on_failure != c.WAIT
    if worker.reason == FailureReason.LAUNCHER_UNRESPONSIVE or severed:
        return _delete(draft, worker, worker.reason)
    best = newest_report(draft)
    if best is None or best.world is None or worker.pod_uid in best.world.members:
        return draft
    return _delete(draft, worker, f"{worker.reason}: training continues without it")


def _outlasted(draft: PlanDraft, worker: Worker) -> PlanDraft:
    """Delete a pod that a side container keeps, because its replacement needs the GPUs."""
    pod = draft.pod(worker)
    if pod is None or not pod.outlasted:
        return draft
    due = (worker.since or draft.now) + c.SIDE_CONTAINER_GRACE
    return draft.requeue_at(due) if draft.now < due else _delete(draft, worker, SIDE_CONTAINER)


def _delete(draft: PlanDraft, worker: Worker, why: str) -> PlanDraft:
    pod = draft.pod(worker)
    if pod is None or pod.absent or pod.deleted_at is not None:
        return draft
    return draft.with_action(DeletePod(name=pod.name, uid=pod.uid, why=why))


def _spent(draft: PlanDraft) -> list[Worker]:
    """Return the ended pods beyond the few that are kept for their logs."""
    ended = [worker for worker in draft.status.in_phase(Phase.ENDED) if _exists(draft.pod(worker))]
    ended.sort(key=lambda worker: worker.incarnation, reverse=True)
    return ended[c.KEEP_ENDED_PODS :]


def _exists(pod: PodView | None) -> bool:
    return pod is not None and not pod.absent


def _forgettable(draft: PlanDraft, worker: Worker) -> bool:
    """Return whether the worker has no object, no place in a generation that may be alive, and no open incident."""
    if worker in draft.finished or (worker.phase is not Phase.ENDED and not _never_was(draft, worker)):
        return False
    membership = draft.status.membership
    due = bool(worker.cause) and not worker.counted and not worker.ordered
    fenced = worker.pod_uid in membership.gone or worker.pod_uid not in membership.named()
    return fenced and not due and not _exists(draft.pod(worker))


def _never_was(draft: PlanDraft, worker: Worker) -> bool:
    """Return whether the worker was ordered away so early that its pod was never created."""
    if worker.known or worker.phase is not Phase.LEAVING:
        return False
    return worker.absent_since is not None and draft.now - worker.absent_since > c.GONE_MARGIN
