"""The job is complete when one launcher exits with 0, or one ``torchrun``, which waits for the others.

Without a rendezvous, each worker does its own part, so all must complete.
"""

from __future__ import annotations

from holdfast_operator.api import names as c
from holdfast_operator.api.reasons import JobReason
from holdfast_operator.api.status import ConditionType, Worker
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.lifecycle.finished import finish
from holdfast_operator.decision.reporting import messages
from holdfast_operator.decision.reporting.progress import newest_progress


def apply(draft: PlanDraft) -> PlanDraft:
    """Complete the job when a trainer has exited with 0, or when its launcher reports that it will."""
    if not _complete(draft):
        return draft
    draft = newest_progress(draft, force=True)
    reached = draft.status.progress or draft.status.last_checkpoint
    return finish(
        draft, ConditionType.COMPLETE, JobReason.COMPLETED, messages.job.completed(reached.step if reached else None)
    )


def _complete(draft: PlanDraft) -> bool:
    if draft.spec.rendezvous == c.NO_RENDEZVOUS:
        return 0 < draft.target <= len(draft.finished)
    uids = {worker.pod_uid for worker in draft.status.workers if worker.known and _speaks_for_all(draft, worker)}
    exits = [pod.exit for pod in draft.seen.pods if pod.uid in uids]
    exits += [report.exit for report in draft.seen.reports if report.pod_uid in uids]
    return any(ended is not None and ended.code == c.EXIT_COMPLETE for ended in exits)


def _speaks_for_all(draft: PlanDraft, worker: Worker) -> bool:
    """Return whether the exit of this worker completes the job. A ``torchrun`` also exits with 0 after SIGTERM."""
    pod = draft.pod(worker)
    return draft.spec.launched or (worker.left_alone and not (pod is not None and pod.leaving))
