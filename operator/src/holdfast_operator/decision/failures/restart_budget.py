"""When a job has failed for good: a budget is spent, or its launcher says that trying again is no use."""

from __future__ import annotations

from holdfast_operator.api import names as c
from holdfast_operator.api.status import Phase, Worker
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures.carry_out import GATHER, launchers_live
from holdfast_operator.decision.lifecycle.finished import finish


def apply(draft: PlanDraft) -> PlanDraft:
    """Fail the job where one of the two holds."""
    ended = [worker for worker in draft.status.in_phase(Phase.ENDED) if worker.final and worker.exit_code]
    if ended:
        return _final(draft, ended)
    for count in draft.status.restarts:
        budget = draft.spec.budget(count.cause)
        if budget is None or len(count.times) <= budget.max_restarts:
            continue
        until = count.times[-1] + GATHER
        if draft.now < until and launchers_live(draft):
            return draft.with_status(backoff_until=max(until, draft.status.backoff_until or until)).requeue_at(until)
        return _spent(draft, count.cause, len(count.times), budget.max_restarts, budget.window_seconds)
    return draft


def _final(draft: PlanDraft, ended: list[Worker]) -> PlanDraft:
    told = max(ended, key=lambda worker: (worker.message.count("\n"), len(worker.message)))
    others = [worker for worker in draft.status.in_phase(Phase.WANTED) if worker.pair is not None]
    oldest = min(worker.since or draft.now for worker in ended)
    if "\n" not in told.message and others and draft.now - oldest < GATHER:
        return draft.requeue_at(oldest + GATHER)
    return finish(draft, c.FAILED, told.reason, told.message)


def _spent(draft: PlanDraft, cause: str, count: int, limit: int, window: int) -> PlanDraft:
    last = next((incident for incident in reversed(draft.status.incidents) if incident.cause == cause), None)
    words = f" The last one: {last.message}" if last else ""
    message = f"{count} incidents of cause {cause} within {_span(window)}, {limit} are allowed.{words}"
    return finish(draft, c.FAILED, f"{cause}BudgetSpent", message)


def _span(seconds: int) -> str:
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds % unit == 0 and seconds >= unit:
            return f"{seconds // unit} {name}"
    return f"{seconds} s"
