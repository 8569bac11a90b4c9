"""``activeDeadlineSeconds``: the longest time that the job may be active."""

from __future__ import annotations

from datetime import timedelta

from holdfast_operator.api.reasons import JobReason
from holdfast_operator.api.status import ConditionType
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.lifecycle.finished import finish
from holdfast_operator.decision.reporting import messages


def apply(draft: PlanDraft) -> PlanDraft:
    """Fail a job whose time is over. Its workers are deleted and write a last checkpoint in their grace period."""
    limit, start = draft.spec.active_deadline_seconds, draft.status.start_time
    if limit is None or start is None or draft.spec.suspend:
        return draft
    due = start + timedelta(seconds=limit)
    if draft.now < due:
        return draft.requeue_at(due)
    return finish(
        draft,
        ConditionType.FAILED,
        JobReason.DEADLINE_EXCEEDED,
        messages.job.deadline_exceeded(limit),
    )
