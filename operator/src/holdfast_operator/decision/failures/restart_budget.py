"""Fail the job permanently: a budget is used up, or its launcher reports that a restart cannot help."""

from __future__ import annotations

from holdfast_operator.api.reasons import BUDGET_EXCEEDED, Cause
from holdfast_operator.api.status import ConditionType, Phase, Worker
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures.carry_out import launchers_live, most_detailed
from holdfast_operator.decision.lifecycle.finished import finish
from holdfast_operator.decision.reporting import messages


def apply(draft: PlanDraft) -> PlanDraft:
    """Fail the job if one of the two applies."""
    ended = [worker for worker in draft.status.in_phase(Phase.ENDED) if worker.final and worker.exit_code]
    if ended:
        return _final(draft, ended)
    for count in draft.status.incidents_by_cause:
        budget = draft.spec.budget(count.cause)
        if budget is None or len(count.times) <= budget.max_restarts:
            continue
        until = count.times[-1] + draft.timings.exits_gather
        if draft.now < until and launchers_live(draft):
            return draft.with_status(backoff_until=max(until, draft.status.backoff_until or until)).requeue_at(until)
        return _spent(draft, count.cause, len(count.times), budget.max_restarts, budget.window_seconds)
    return draft


def _final(draft: PlanDraft, ended: list[Worker]) -> PlanDraft:
    told = most_detailed(ended) or ended[0]
    others = [worker for worker in draft.status.in_phase(Phase.WANTED) if worker.attempt_id is not None]
    oldest = min(worker.since or draft.now for worker in ended)
    if not told.traceback and others and draft.now - oldest < draft.timings.exits_gather:
        return draft.requeue_at(oldest + draft.timings.exits_gather)
    return finish(draft, ConditionType.FAILED, told.reason, told.message)


def _spent(draft: PlanDraft, cause: Cause, count: int, limit: int, window: int) -> PlanDraft:
    last = next((incident for incident in reversed(draft.status.incidents) if incident.cause == cause), None)
    message = messages.recovery.budget_exceeded(count, cause, _span(window), limit, last.message if last else "")
    return finish(draft, ConditionType.FAILED, BUDGET_EXCEEDED[cause], message)


def _span(seconds: int) -> str:
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds % unit == 0 and seconds >= unit:
            return f"{seconds // unit} {name}"
    return f"{seconds} s"
