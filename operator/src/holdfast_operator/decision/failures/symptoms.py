"""Symptoms of workers that have not failed: a condition of the pod or an error of a GPU that a rule matches.

Each symptom causes one decision and one incident. A failure of the same pod shortly before or after belongs to that
incident.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from holdfast_operator.api import names as c
from holdfast_operator.api.child_names import pod_name
from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.reasons import Basis, Cause, FailureReason, RecoveryAction, WorkerReason
from holdfast_operator.api.status import Incident, Phase, Worker, say
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures import evidence as found
from holdfast_operator.decision.failures import recovery_decision as decisions
from holdfast_operator.decision.failures.avoided_nodes import avoiding
from holdfast_operator.decision.failures.carry_out import carry_out
from holdfast_operator.decision.failures.evidence import FailureEvidence
from holdfast_operator.decision.failures.record_incident import announced, decided, record, recounted
from holdfast_operator.decision.failures.rules import first_match
from holdfast_operator.decision.reporting import messages
from holdfast_operator.decision.workers.replicas import order_away

_KEPT = 64


@dataclass(frozen=True, kw_only=True)
class _Symptom:
    key: str
    reason: str
    message: str
    cause: Cause
    facts: FailureEvidence


def apply(draft: PlanDraft) -> PlanDraft:
    """Decide about new symptoms, one per worker and pass."""
    for worker in draft.status.in_phase(Phase.WANTED):
        # An earlier decision in this pass may have ordered this worker to leave.
        symptom = _new(draft, worker) if worker in draft.status.workers else None
        if symptom is not None:
            draft = (_unfit if draft.idle(worker) else _answered)(draft, worker, symptom)
    return draft


def _unfit(draft: PlanDraft, worker: Worker, symptom: _Symptom) -> PlanDraft:
    """Replace a spare if the action would replace a worker. It trains nothing, so this is no incident."""
    draft = draft.changed_worker(worker, symptoms=(*worker.symptoms, symptom.key)[-_KEPT:])
    match, error = first_match(draft.spec.rules, symptom.facts), decisions.advised(symptom.facts)
    action = match.rule.action if match is not None else error.action if error is not None else RecoveryAction.IGNORE
    if action in (RecoveryAction.IGNORE, RecoveryAction.IN_PLACE):
        return draft
    if action == RecoveryAction.REPLACE_NODE and worker.node:
        draft = avoiding(draft, worker.node, symptom.reason, c.AVOID_REPLACED)
    message = messages.workers.spare_lost(symptom.message)
    return order_away(draft, worker, symptom.reason, message).with_event(
        WorkerReason.SPARE_LOST, message, warning=True
    )


def _new(draft: PlanDraft, worker: Worker) -> _Symptom | None:
    """Return the first new symptom. Before the launcher is ready, conditions such as Ready mean nothing."""
    pod = draft.pod(worker)
    if pod is None or pod.absent or pod.terminal or worker.ready_at is None:
        return None
    new = (item for item in _shown(draft, worker) if item.key not in worker.symptoms)
    return next((item for item in new if _asked_about(draft, item)), None)


def _shown(draft: PlanDraft, worker: Worker) -> Iterator[_Symptom]:
    """Yield the GPU errors, each together with all conditions, and then the conditions."""
    facts = found.of_running(draft, worker)
    name = pod_name(draft.seen.job.name, worker.incarnation)
    for error in facts.gpu_errors:
        yield _Symptom(
            key=f"{error.gpu}/{found.fault_of(error)}",
            reason=FailureReason.GPU_ERROR,
            message=messages.recovery.gpu_error(name, error.message or error.kind),
            cause=error.cause or Cause.INFRASTRUCTURE,
            facts=replace(facts, gpu_errors=(error,)),
        )
    for condition in facts.conditions:
        kind, status, reason = condition
        yield _Symptom(
            key=f"{kind}={status}/{reason}",
            reason=FailureReason.POD_CONDITION,
            message=messages.recovery.pod_condition(name, kind, status, reason),
            cause=Cause.INFRASTRUCTURE,
            facts=replace(facts, conditions=(condition,), gpu_errors=()),
        )


def _asked_about(draft: PlanDraft, symptom: _Symptom) -> bool:
    return first_match(draft.spec.rules, symptom.facts) is not None or decisions.advised(symptom.facts) is not None


def _answered(draft: PlanDraft, worker: Worker, symptom: _Symptom) -> PlanDraft:
    worker = replace(worker, symptoms=(*worker.symptoms, symptom.key)[-_KEPT:])
    draft = draft.with_worker(worker)
    incident = _incident(draft, worker, symptom)
    known = same_failure(draft, incident)
    if known is not None:
        return _known_better(draft, known, symptom.facts, worker)
    elsewhere = _elsewhere(draft, incident, symptom, worker)
    if elsewhere is not None and first_match(draft.spec.rules, symptom.facts) is not None:
        return _also_here(draft, elsewhere, incident, symptom.facts, worker)
    return record(draft, incident, symptom.facts, worker)


def _incident(draft: PlanDraft, worker: Worker, symptom: _Symptom) -> Incident:
    return Incident(
        number=0,
        attempt_id=AttemptId(generation=draft.status.membership.generation, attempt=0),
        cause=symptom.cause,
        action="",
        reason=symptom.reason,
        message=say(symptom.message),
        pod=pod_name(draft.seen.job.name, worker.incarnation),
        rank=None,
        node=worker.node or None,
        detected=draft.now,
    )


def same_failure(draft: PlanDraft, incident: Incident) -> Incident | None:
    """Return the newest incident of this pod if it was detected within ``SAME_FAILURE`` of this one."""
    of_pod = [known for known in draft.status.incidents if known.pod == incident.pod and known.attempt_id.attempt > 0]
    newest = of_pod[-1] if of_pod else None
    recent = newest is not None and abs(incident.detected - newest.detected) <= c.SAME_FAILURE
    return newest if recent else None


def _known_better(draft: PlanDraft, known: Incident, facts: FailureEvidence, worker: Worker) -> PlanDraft:
    """Decide again about a failure that was counted before its symptom was known: cause and action may change."""
    if known.decision is None or known.decision.basis is not Basis.DEFAULT:
        return draft
    decision = decisions.of(draft, known, facts, worker)
    changed = replace(decided(known, decision), cause=decision.cause)
    kept = tuple(changed if incident is known else incident for incident in draft.status.incidents)
    draft = recounted(draft.with_status(incidents=kept), known.cause, decision)
    return carry_out(announced(draft, changed, decision), changed, decision, worker)


def _elsewhere(draft: PlanDraft, incident: Incident, symptom: _Symptom, worker: Worker) -> Incident | None:
    """Return the recent incident of another pod whose GPUs reported the same fault while this worker was ready.

    If this worker became ready later, the symptom is a new incident.
    """
    shown = {found.fault_of(error) for error in symptom.facts.gpu_errors}
    for known in reversed(draft.status.incidents):
        recent = abs(incident.detected - known.detected) <= c.SAME_FAILURE
        there = worker.ready_at is not None and worker.ready_at <= known.detected
        if recent and there and shown & found.faults(draft, known.pod, known.detected):
            return known
    return None


def _also_here(
    draft: PlanDraft, known: Incident, incident: Incident, facts: FailureEvidence, worker: Worker
) -> PlanDraft:
    """Apply the rule to this pod as well, without counting the incident again."""
    decision = decisions.first(draft, incident, facts, worker)
    message = messages.recovery.symptom_elsewhere(incident.pod or "", decision.message, known.pod or "")
    draft = draft.with_event(decision.reason, message, warning=True)
    return carry_out(draft, incident, decision, worker)
