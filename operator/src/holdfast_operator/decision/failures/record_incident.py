"""Record an incident once: in the list, in the count of its cause, and with the decision about it.

Invariant: each incident in the list was counted when it was added, or its decision excludes it from all budgets.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from holdfast_operator.api import names as c
from holdfast_operator.api.reasons import (
    SYMPTOMS,
    WITH_BACKOFF,
    Basis,
    Cause,
    JobReason,
    LauncherReason,
    RecoveryAction,
)
from holdfast_operator.api.status import Incident, IncidentCount, Worker, say
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures import recovery_decision as decisions
from holdfast_operator.decision.failures.backoff import pause
from holdfast_operator.decision.failures.carry_out import carry_out
from holdfast_operator.decision.failures.evidence import FailureEvidence
from holdfast_operator.decision.failures.recovery_decision import Decision
from holdfast_operator.decision.failures.repeat_offenders import offended
from holdfast_operator.decision.plan import DecisionMetric, RecoveryMetric
from holdfast_operator.decision.reporting import messages


def record(draft: PlanDraft, incident: Incident, facts: FailureEvidence, worker: Worker | None) -> PlanDraft:
    """Decide about an incident, count it, report it, and order what was decided."""
    decision = decisions.of(draft, incident, facts, worker)
    number = max((known.number for known in draft.status.incidents), default=0) + 1
    incident = decided(replace(incident, number=number, cause=decision.cause), decision)
    draft = _listed(draft, incident)
    draft = decisions.tallied(draft, incident, decision)
    draft = _counted(draft, incident) if decision.counts else draft
    draft = draft.with_status(backoff_until=_backoff(draft, incident, decision))
    draft = draft.with_event(incident.reason, f"{incident.cause}: {incident.message}", warning=True)
    draft = announced(draft, incident, decision)
    return offended(carry_out(draft, incident, decision, worker), incident, worker)


def updated(draft: PlanDraft, known: Incident, changed: Incident) -> PlanDraft:
    """Put a changed incident into the list. Report it when training has resumed after it."""
    if changed == known:
        return draft
    kept = tuple(changed if incident is known else incident for incident in draft.status.incidents)
    draft = draft.with_status(incidents=kept)
    if known.resumed is None and changed.resumed is not None:
        seconds = (changed.resumed - changed.detected).total_seconds()
        recovered = RecoveryMetric(cause=changed.cause, seconds=max(0.0, seconds), lost_steps=changed.lost_steps or 0)
        draft = replace(draft, recovered=(*draft.recovered, recovered))
        message = messages.recovery.resumed(
            seconds,
            changed.reason,
            launched=draft.spec.launched,
            lost_steps=changed.lost_steps,
            origin=changed.restored_from or "",
        )
        draft = draft.with_event(JobReason.TRAINING_RESUMED, message)
    return draft


def _listed(draft: PlanDraft, incident: Incident) -> PlanDraft:
    """Add the incident and keep the newest ones. A later report of a removed incident is recognised as counted."""
    incidents = (*draft.status.incidents, incident)
    off = [known.attempt_id for known in incidents[: -c.MAX_INCIDENTS] if known.attempt_id.attempt > 0]
    return draft.with_status(incidents=incidents[-c.MAX_INCIDENTS :], forgotten=max([draft.status.forgotten, *off]))


def decided(incident: Incident, decision: Decision) -> Incident:
    """Return the incident with the decision. For ``InPlace``, the action that launchers reported is kept."""
    in_place = decision.action == RecoveryAction.IN_PLACE and incident.action
    action = incident.action if in_place else decision.action
    return replace(incident, action=action, decision=decision.reason, why=say(decision.message))


def announced(draft: PlanDraft, incident: Incident, decision: Decision) -> PlanDraft:
    """Report the decision as event, log and metric."""
    word = DecisionMetric(cause=incident.cause, action=decision.action, reason=decision.reason)
    return draft.with_decision_metric(word).with_event(
        decision.reason, decision.message, warning=decision.action == RecoveryAction.FAIL_JOB
    )


def _counted(draft: PlanDraft, incident: Incident) -> PlanDraft:
    status = draft.status
    counts = {count.cause: count for count in status.incidents_by_cause}
    count = counts.get(incident.cause, IncidentCount(cause=incident.cause))
    budget = draft.spec.budget(incident.cause)
    kept = max(c.COUNTED_TIMES, budget.max_restarts + 1 if budget is not None else 0)
    times = (*count.times, draft.now)[-kept:]
    counts[incident.cause] = replace(count, total=count.total + 1, times=times)
    by_cause = tuple(counts[cause] for cause in sorted(counts))
    draft = draft.with_status(incidents_by_cause=by_cause, incident_count=status.incident_count + 1)
    return replace(draft, counted=(*draft.counted, incident.cause))


def recounted(draft: PlanDraft, before: Cause, decision: Decision) -> PlanDraft:
    """Correct the counts after the cause of the newest incident changed, or after it was ignored."""
    counts = {count.cause: count for count in draft.status.incidents_by_cause}
    old = counts.get(before)
    if old is None or not old.times or (before == decision.cause and decision.counts):
        return draft
    counts[before] = replace(old, times=old.times[:-1])
    if decision.counts:
        new = counts.get(decision.cause, IncidentCount(cause=decision.cause))
        times = tuple(sorted((*new.times, old.times[-1])))
        counts[before] = replace(counts[before], total=old.total - 1)
        counts[decision.cause] = replace(new, total=new.total + 1, times=times)
    return draft.with_status(incidents_by_cause=tuple(counts[cause] for cause in sorted(counts)))


def judged_anew(
    draft: PlanDraft, known: Incident, changed: Incident, facts: FailureEvidence, worker: Worker | None
) -> tuple[PlanDraft, Incident]:
    """Decide again about an incident with corrected facts, and update the list, the counts and the orders."""
    decision = decisions.of(draft, changed, facts, worker)
    new = decided(replace(changed, cause=decision.cause), decision)
    kept = tuple(new if incident is known else incident for incident in draft.status.incidents)
    draft = draft.with_status(incidents=kept)
    if known.action != RecoveryAction.IGNORE:
        draft = recounted(draft, known.cause, decision)
    elif decision.counts:
        draft = _counted(draft, new)
    if (known.decision, known.cause) == (new.decision, new.cause):
        return draft, new
    if known.cause not in WITH_BACKOFF:
        draft = draft.with_status(backoff_until=_backoff(draft, new, decision))
    return carry_out(announced(draft, new, decision), new, decision, worker), new


def _backoff(draft: PlanDraft, incident: Incident, decision: Decision) -> datetime | None:
    """Return until when replacements wait: after failures that may repeat at once, and after an escalation.

    An interruption causes no wait. A symptom causes one from its second occurrence on, as each new pod may show it.
    """
    shown = incident.reason in SYMPTOMS
    if incident.reason == LauncherReason.OUT_OF_MEMORY_RETRIED:
        return draft.status.backoff_until
    by_itself = incident.cause in WITH_BACKOFF or incident.attempt_id.attempt == 0
    if not by_itself and decision.basis is not Basis.ESCALATED:
        return draft.status.backoff_until
    counted = next(
        (len(count.times) for count in draft.status.incidents_by_cause if count.cause == incident.cause), 0
    )
    tries = (counted if decision.counts else decisions.ignored(draft)) - shown
    until = draft.now + pause(draft.spec.backoff, tries, f"{draft.seen.job.uid}/{incident.number}")
    return max(until, draft.status.backoff_until or until)
