"""Restore labels, by which pods are listed, and owners that another client removed.

Such a pod still trains. A direct read finds it, so it never counts as absent.
"""

from __future__ import annotations

from holdfast_operator.api.reasons import WorkerReason
from holdfast_operator.api.status import Phase, Worker
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.plan import RestorePod
from holdfast_operator.decision.reporting import messages
from holdfast_operator.manifests.common import worker_marks
from holdfast_operator.views import PodView

SHOWN = 5


def apply(draft: PlanDraft) -> PlanDraft:
    """Restore what was removed, and name the pods in one event."""
    changed = [
        (worker, pod)
        for worker in draft.status.workers
        if worker.phase is not Phase.ENDED and (pod := draft.pod(worker)) is not None and _strayed(pod)
    ]
    if not changed:
        return draft
    draft = draft.with_action(*(_restored(draft, worker, pod) for worker, pod in changed))
    names = ", ".join(pod.name for _, pod in changed[:SHOWN])
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    message = messages.workers.pods_relabelled(f"{names}{more}")
    return draft.with_event(WorkerReason.POD_RELABELLED, message, warning=True)


def _strayed(pod: PodView) -> bool:
    return pod.relabelled and not pod.absent


def _restored(draft: PlanDraft, worker: Worker, pod: PodView) -> RestorePod:
    return RestorePod(name=pod.name, uid=pod.uid, marks=worker_marks(draft.seen.job, worker.incarnation))
