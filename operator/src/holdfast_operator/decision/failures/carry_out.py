"""The effect of a decision on pods and nodes. The status records each order; later passes perform it."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_operator.api import names as c
from holdfast_operator.api.reasons import Basis, RecoveryAction
from holdfast_operator.api.status import ConditionType, Incident, Phase, Worker
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures.avoided_nodes import avoiding
from holdfast_operator.decision.failures.recovery_decision import Decision
from holdfast_operator.decision.lifecycle.finished import finish
from holdfast_operator.decision.workers.replicas import order_away


def carry_out(draft: PlanDraft, incident: Incident, decision: Decision, worker: Worker | None) -> PlanDraft:
    """Order what the decision requires. For ``InPlace`` and ``Ignore``, the launchers do what is needed."""
    node = incident.node or (worker.node if worker is not None else "")
    match decision.action:
        case RecoveryAction.RECREATE_POD:
            return _away(draft, [worker] if worker is not None else [], decision)
        case RecoveryAction.REPLACE_NODE if node:
            draft = avoiding(draft, node, decision.reason, c.AVOID_REPLACED)
            return _away(draft, _bound_for(draft, node), decision)
        case RecoveryAction.RESTART_GANG:
            return _away(draft, draft.status.in_phase(Phase.WANTED), decision)
    return draft


def _away(draft: PlanDraft, workers: Iterable[Worker], decision: Decision) -> PlanDraft:
    """Order these workers to leave, if they are still wanted. An ordered departure is no further incident."""
    wanted = {worker.incarnation: worker for worker in draft.status.in_phase(Phase.WANTED)}
    for worker in workers:
        if worker.incarnation in wanted:
            draft = order_away(draft, wanted[worker.incarnation], decision.reason, decision.message)
    return draft


def _bound_for(draft: PlanDraft, node: str) -> list[Worker]:
    """Return all workers on the node, and those without a node that may still be scheduled there."""
    wanted = draft.status.in_phase(Phase.WANTED)
    return [worker for worker in wanted if worker.node == node or (not worker.node and node not in worker.avoid)]


def apply(draft: PlanDraft) -> PlanDraft:
    """Fail the job after a decision ``FailJob``, once its launchers have had time to exit with their tracebacks.

    If no rule decided, the reason is the one of the failure, as when launchers fail the job themselves.
    """
    incident = next((item for item in draft.status.incidents if _fails_job(item)), None)
    if incident is None or incident.decision is None:
        return draft
    until = incident.detected + draft.timings.exits_gather
    ended = [worker for worker in draft.status.in_phase(Phase.ENDED) if worker.final]
    awaited = launchers_live(draft) and not any(worker.traceback for worker in ended)
    if incident.detected <= draft.now < until and awaited:
        return draft.with_status(backoff_until=max(until, draft.status.backoff_until or until)).requeue_at(until)
    found = most_detailed(ended)
    told = found is not None and (found.traceback or len(found.message) > len(incident.message))
    detail = found.message if found is not None and told else incident.message
    reason = incident.reason if incident.decision.basis is Basis.DEFAULT else incident.decision
    return finish(draft, ConditionType.FAILED, reason, f"{incident.why}. {detail}")


def _fails_job(incident: Incident) -> bool:
    return incident.decision is not None and incident.decision.action is RecoveryAction.FAIL_JOB


def most_detailed(ended: Iterable[Worker]) -> Worker | None:
    """Return the worker whose message contains the traceback, or else the worker with the longest message."""
    return max(ended, key=lambda worker: (worker.traceback, len(worker.message)), default=None)


def launchers_live(draft: PlanDraft) -> bool:
    """Return whether a launcher reports. Launchers decide as well, and exit by themselves with traceback and logs."""
    reports = [draft.seen.report(worker.pod_uid) for worker in draft.status.in_phase(Phase.WANTED)]
    return any(report is not None and report.fresh(draft.now) for report in reports)
