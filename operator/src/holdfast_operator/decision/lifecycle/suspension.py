"""Suspend a job: all workers agree on a checkpoint, write it and leave. This is no incident.

The schema forbids changes of the template until the condition Suspended is true. The workers of a world therefore
never have different templates.
"""

from __future__ import annotations

from holdfast_operator.api.reasons import JobReason
from holdfast_operator.api.status import ConditionType, GangAttempt, Phase, StartingPoint
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.reporting import messages
from holdfast_operator.decision.set_condition import Reason
from holdfast_operator.decision.workers.replicas import order_away

RESUMED = Reason(JobReason.JOB_UNSUSPENDED, messages.job.unsuspended())
_NOTHING = Reason(JobReason.SUSPENDED, messages.job.suspended())


def apply(draft: PlanDraft) -> PlanDraft:
    """Order all workers away while the job is suspended, and record when it is resumed."""
    if not draft.spec.suspend:
        return _resumed(draft)
    # Waits and deadlines from before the suspension are over. A resumed job starts again.
    draft = draft.with_status(
        backoff_until=None, stalled_since=None, trouble=None, gang=GangAttempt(), start_time=None
    )
    for worker in draft.status.in_phase(Phase.WANTED):
        draft = order_away(draft, worker, JobReason.SUSPENDED, messages.job.suspended())
    # A lost worker may return (``lost_workers``) and must then leave, too. Silence triggers no pass, so look again.
    return draft.requeue_soon() if draft.status.in_phase(Phase.LOST) else draft


def _resumed(draft: PlanDraft) -> PlanDraft:
    known = draft.status.condition(ConditionType.SUSPENDED)
    if known is None or known.reason == RESUMED.reason:
        return draft
    draft = draft.with_condition(ConditionType.SUSPENDED, False, RESUMED)
    return draft.with_event(RESUMED.reason, RESUMED.message)


def shown(draft: PlanDraft) -> PlanDraft:
    """Return the draft with the conditions of a suspended job."""
    left = sum(1 for worker in draft.status.in_phase(Phase.WANTED, Phase.LEAVING) if worker.known)
    words = (
        _leaving(draft, left)
        if left
        else Reason(JobReason.SUSPENDED, messages.checkpoints.no_worker_left(_resumes_from(draft)))
    )
    if not left:
        draft = draft.with_status(origin=StartingPoint(after=draft.status.membership.generation))
    before = draft.status.condition(ConditionType.SUSPENDED)
    draft = draft.with_condition(ConditionType.SUSPENDED, not left, words)
    for kind in (ConditionType.READY, ConditionType.RESTARTING, ConditionType.DEGRADED):
        draft = draft.with_condition(kind, False, _NOTHING)
    draft = draft.with_status(summary=words.reason, wanted_workers=draft.spec.replicas, ready_workers=0)
    if before is None or before.reason != words.reason:
        draft = draft.with_event(words.reason, words.message)
    return draft


def _leaving(draft: PlanDraft, left: int) -> Reason:
    return Reason(JobReason.SUSPENDING, messages.checkpoints.suspending(left, launched=draft.spec.launched))


def _resumes_from(draft: PlanDraft) -> str:
    if not draft.spec.launched:
        return messages.checkpoints.script_resumes()
    newest = draft.status.last_checkpoint
    if newest is not None:
        return messages.checkpoints.newest_checkpoint(newest.step)
    if draft.status.membership.active is None:
        return messages.checkpoints.never_trained()
    if not draft.spec.checkpoint.has_shared_tier:
        return messages.checkpoints.starts_over()
    return messages.checkpoints.no_checkpoint()
