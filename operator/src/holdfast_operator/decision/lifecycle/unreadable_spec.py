"""A resource that this version cannot read: the operator reports it and changes nothing."""

from __future__ import annotations

from dataclasses import replace

from holdfast_operator.api.reasons import JobReason
from holdfast_operator.api.status import ConditionType
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.reporting import messages
from holdfast_operator.decision.set_condition import Reason


def apply(draft: PlanDraft) -> PlanDraft:
    """End the pass if the spec cannot be read. Nothing that runs is changed."""
    job = draft.seen.job
    if job.spec is not None:
        return draft
    message = messages.job.invalid_spec(job.unreadable)
    before = draft.status.condition(ConditionType.DEGRADED)
    draft = draft.with_condition(ConditionType.DEGRADED, True, Reason(JobReason.INVALID_SPEC, message))
    draft = replace(draft.with_status(summary=JobReason.INVALID_SPEC), ended=True)
    if before is None or before.reason != JobReason.INVALID_SPEC:
        draft = draft.with_event(JobReason.INVALID_SPEC, message, warning=True)
    return draft
