"""The start of training: step 0, or a checkpoint that an earlier job left in the folder.

The first claim of a job contains it. The claim is written before the first step, with the step and the attempt ID
that training resumes from. The message is repeated after each suspension.
"""

from __future__ import annotations

from holdfast_operator.api import names as c
from holdfast_operator.api.reasons import JobReason
from holdfast_operator.api.status import StartingPoint
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.reporting import messages


def apply(draft: PlanDraft) -> PlanDraft:
    """Report the start as soon as the first claim is known."""
    known = draft.status.origin
    if known.attempt_id is not None:
        return draft
    own = [claim for claim in draft.status.membership.claims if claim.job_uid == draft.seen.job.uid]
    later = [claim for claim in own if claim.attempt_id.generation > known.after]
    if not later:
        return draft
    first = min(later, key=lambda claim: claim.order)
    step, resumes = first.from_step, first.from_attempt_id is not None
    message = (
        messages.checkpoints.resumes_from(step, suspended_before=known.after > 0)
        if resumes
        else _starts(draft, known)
    )
    origin = StartingPoint(after=known.after, attempt_id=first.attempt_id, step=step, message=message)
    return draft.with_status(origin=origin).with_event(
        JobReason.RESUMES_FROM_CHECKPOINT if resumes else JobReason.STARTED_FROM_STEP_ZERO, message
    )


def _starts(draft: PlanDraft, known: StartingPoint) -> str:
    always = known.after or draft.spec.checkpoint.resume == c.RESUME_ALWAYS
    return messages.checkpoints.starts_without_checkpoint() if always else messages.checkpoints.starts_by_request()
