"""Incidents: each failure is recorded once, identified by the attempt that it ended.

Launchers that survive report a failure themselves, all under the same attempt ID. The operator adds the failures that
no launcher is left to report. It corrects a reported cause only if it knows more: which client ordered a deletion,
and which node failed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from holdfast_operator.api import names as c
from holdfast_operator.api.child_names import pod_name
from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.reasons import (
    SYMPTOMS,
    WITH_BACKOFF,
    Cause,
    FailureReason,
    LauncherReason,
    StartupReason,
    WorkerReason,
)
from holdfast_operator.api.status import Incident, Phase, Worker, reason_word, say
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures import causes, evidence, oom
from holdfast_operator.decision.failures.record_incident import judged_anew, record, updated
from holdfast_operator.decision.reporting import messages
from holdfast_operator.decision.reporting.progress import newest_progress
from holdfast_operator.views import Report, ReportedIncident

# Launchers report these reasons for an exit whose cause they do not know.
_BLIND = frozenset({LauncherReason.MEMBER_LOST, LauncherReason.DRAINED})
# These reasons describe how a container ended after SIGTERM, not why the signal was sent.
_HOW = frozenset({FailureReason.DRAINED_ON_REQUEST, FailureReason.KILLED})


def apply(draft: PlanDraft) -> PlanDraft:
    """Record what launchers report, then what only the operator observes. Close incidents that are over."""
    for report in _reported(draft):
        draft = _take_report(draft, report)
    for worker in draft.status.in_phase(Phase.LOST, Phase.ENDED, Phase.LEAVING):
        draft = _count_worker(draft, worker)
    return _close_recovered(_drop_expired(draft))


def _reported(draft: PlanDraft) -> list[ReportedIncident]:
    found = [incident for report in draft.seen.reports for incident in report.incidents]
    return sorted(found, key=lambda incident: incident.attempt_id)


@dataclass(frozen=True)
class _Forgotten:
    """The incident is older than all that is remembered, so it was counted before."""


@dataclass(frozen=True)
class _Known:
    """The incident is recorded under the attempt that it ended."""

    incident: Incident


@dataclass(frozen=True)
class _PartOf:
    """The report is part of an incident that began with another attempt; None: that one is not recorded yet."""

    whole: Incident | None


@dataclass(frozen=True)
class _ReplayOf:
    """The loss of this pod was counted already, when the pod was given up."""

    loss: Incident


@dataclass(frozen=True)
class _Confirms:
    """The incident follows a symptom that was counted as the failure."""

    symptom: Incident


@dataclass(frozen=True)
class _Pending:
    """The pod's exit, which has more information than the report, is expected within a moment."""


@dataclass(frozen=True)
class _New:
    """The incident is to be counted."""

    incident: Incident
    worker: Worker | None


_Match = _Forgotten | _Known | _PartOf | _ReplayOf | _Confirms | _Pending | _New


def _classify(draft: PlanDraft, report: ReportedIncident) -> _Match:
    """Return what the report is about. The order counts: the first match is the answer."""
    if draft.status.forgot(report.attempt_id):
        return _Forgotten()
    known = next((incident for incident in draft.status.incidents if incident.attempt_id == report.attempt_id), None)
    if known is not None:
        return _Known(known)
    if oom.taken_in(draft, report):
        return _PartOf(oom.whole(draft, report))
    loss = loss_before(draft, report)
    if loss is not None:
        return _ReplayOf(loss)
    incident = _incident_of(draft, report)
    symptom = _symptom_of(draft, incident)
    if symptom is not None:
        return _Confirms(symptom)
    worker = _worker_of(draft, incident)
    return _Pending() if _exit_expected(draft, report, worker) else _New(incident, worker)


def _take_report(draft: PlanDraft, report: ReportedIncident) -> PlanDraft:
    match _classify(draft, report):
        case _Forgotten():
            return draft
        case _Known(known):
            worker = _worker_of(draft, _incident_of(draft, report))
            draft, known = oom.informed(draft, known, report, worker)
            return _fill_in(draft, known, report)
        case _PartOf(whole):
            return draft if whole is None else _extend(draft, whole, report)
        case _ReplayOf(loss):
            return _extend(draft, loss, report)
        case _Confirms(symptom):
            changed = replace(
                symptom, attempt_id=report.attempt_id, resumed=None, lost_steps=None, restored_from=None
            )
            return _fill_in(updated(draft, symptom, changed), changed, report)
        case _Pending():
            return draft.requeue_in(c.POLL_OPEN)
        case _New(incident, worker):
            draft = record(draft, incident, evidence.of_incident(draft, worker, report, incident.detected), worker)
            return _fill_in(draft, draft.status.incidents[-1], report)


def loss_before(draft: PlanDraft, report: ReportedIncident) -> Incident | None:
    """Return the counted loss of this pod, which was given up as unreachable, returned, and left again when deleted.

    All losses of a worker that is no longer listed were counted.
    """
    worker = _worker_of(draft, _incident_of(draft, report))
    gone = worker is None or (worker.counted and worker.phase in (Phase.LOST, Phase.ENDED))
    if report.pod is None or not gone:
        return None
    return next((known for known in reversed(draft.status.incidents) if _is_earlier_loss(known, report)), None)


def _is_earlier_loss(known: Incident, report: ReportedIncident) -> bool:
    return known.pod == report.pod and known.attempt_id < report.attempt_id


def _symptom_of(draft: PlanDraft, incident: Incident) -> Incident | None:
    """Return the symptom of the pod, a moment before it failed, that was counted as this failure.

    A GPU fault that was counted for another pod, and that this pod shows too, is such a symptom.
    """
    faults = evidence.faults(draft, incident.pod, incident.detected)
    for known in reversed(draft.status.incidents):
        here = known.pod == incident.pod or bool(faults & evidence.faults(draft, known.pod, known.detected))
        shown = known.attempt_id.attempt == 0 and known.reason in SYMPTOMS and here
        if shown and abs(incident.detected - known.detected) <= c.SAME_FAILURE:
            return known
    return None


def _exit_expected(draft: PlanDraft, report: ReportedIncident, worker: Worker | None) -> bool:
    """Return whether the container's exit is still expected. Launchers detect a loss or SIGTERM earlier."""
    blind = report.reason in _BLIND
    if not blind or report.detected is None or worker is None or worker.phase is not Phase.WANTED:
        return False
    return timedelta(0) <= draft.now - report.detected < c.END_SEEN


def _incident_of(draft: PlanDraft, report: ReportedIncident) -> Incident:
    incident = Incident(
        number=0,
        attempt_id=report.attempt_id,
        cause=report.cause,
        action=report.action or "Restart",
        reason=reason_word(report.reason),
        message=say(report.message),
        pod=report.pod,
        rank=report.rank,
        node=report.node,
        detected=report.detected or draft.now,
    )
    return _with_known_cause(draft, incident)


def _with_known_cause(draft: PlanDraft, incident: Incident) -> Incident:
    """Return the incident with the cause of a deletion, failed node or exceeded limit, if there is one."""
    worker = _worker_of(draft, incident)
    if incident.cause not in (Cause.INFRASTRUCTURE, Cause.INTERRUPTION) or worker is None:
        return incident
    knows = worker.cause in (Cause.INFRASTRUCTURE, Cause.INTERRUPTION, Cause.OOM)
    if worker.phase is Phase.WANTED or not (knows or worker.reason == FailureReason.EVICTED):
        return incident
    if incident.reason != LauncherReason.DRAINED:
        return incident if worker.cause == incident.cause else _with_worker_cause(incident, worker)
    return incident if worker.reason in _HOW else _with_worker_cause(incident, worker)


def _with_worker_cause(incident: Incident, worker: Worker) -> Incident:
    return replace(incident, cause=worker.cause or incident.cause, reason=worker.reason, message=worker.message)


def _worker_of(draft: PlanDraft, incident: Incident) -> Worker | None:
    job = draft.seen.job.name
    return next((worker for worker in draft.status.workers if f"{job}-w{worker.incarnation}" == incident.pod), None)


def _fill_in(draft: PlanDraft, known: Incident, report: ReportedIncident) -> PlanDraft:
    """Add what was not known before; recorded values stay."""
    changed = replace(
        known,
        resumed=known.resumed or report.resumed,
        lost_steps=known.lost_steps if known.lost_steps is not None else report.lost_steps,
        restored_from=known.restored_from or report.restored_from,
        rank=known.rank if known.rank is not None else report.rank,
        node=known.node or report.node,
    )
    return updated(draft, known, changed)


def _extend(draft: PlanDraft, known: Incident, report: ReportedIncident) -> PlanDraft:
    """Extend an incident that began with another attempt: it is the same failure until training resumes."""
    lost = [steps for steps in (known.lost_steps, report.lost_steps) if steps is not None]
    later = max(filter(None, (known.resumed, report.resumed)), default=None)
    return updated(draft, known, replace(known, resumed=later, lost_steps=max(lost, default=None)))


def _count_worker(draft: PlanDraft, worker: Worker) -> PlanDraft:
    if worker.counted or worker.ordered or not worker.cause or worker.phase is Phase.LEAVING:
        return draft
    if _already_counted(draft, worker):
        return _explain_drain(draft, worker).changed_worker(worker, counted=True)
    if worker.attempt_id is None:
        return _count_startup_failure(draft, worker)
    since, reported = worker.since or draft.now, oom.told_of(draft, worker)
    due = since + draft.timings.incident_grace
    if reported is None and _live_launcher_will_report(draft, worker) and draft.now < due:
        return draft.requeue_at(due)
    known = reported or oom.of_container(draft, worker)
    draft = (
        _record_observed(draft, worker, worker.attempt_id)
        if known is None
        else _refine_by_container_exit(draft, known, worker)
    )
    return draft.changed_worker(worker, counted=True)


def _refine_by_container_exit(draft: PlanDraft, known: Incident, worker: Worker) -> PlanDraft:
    """Update the incident with the exit of the container, which contains more than its processes' exits."""
    moment = worker.since or draft.now
    return judged_anew(draft, known, known, evidence.of_incident(draft, worker, None, moment), worker)[0]


def _explain_drain(draft: PlanDraft, worker: Worker) -> PlanDraft:
    """Add the reason for SIGTERM from the pod's last status, which may arrive long after the launcher's report."""
    name = pod_name(draft.seen.job.name, worker.incarnation)
    of_pod = (
        known for known in draft.status.incidents if (known.pod, known.reason) == (name, LauncherReason.DRAINED)
    )
    known = next(
        (known for known in of_pod if worker.attempt_id is not None and known.attempt_id >= worker.attempt_id), None
    )
    changed = _with_known_cause(draft, known) if known is not None and worker.phase is Phase.ENDED else known
    if known is None or changed is None or changed == known:
        return draft
    found = evidence.of_incident(draft, worker, None, known.detected)
    draft, known = judged_anew(draft, known, changed, found, worker)
    return draft.with_event(known.reason, f"{known.cause}: {known.message}", warning=True)


def _already_counted(draft: PlanDraft, worker: Worker) -> bool:
    """Return whether an incident of the worker's world, or a later one that names the worker, is recorded."""
    if worker.attempt_id is None:
        return False
    if _ended_with_torchrun(draft, worker):
        return True
    name = pod_name(draft.seen.job.name, worker.incarnation)
    return any(
        incident.attempt_id == worker.attempt_id
        or (incident.pod == name and incident.attempt_id >= worker.attempt_id)
        for incident in draft.status.incidents
    ) or draft.status.forgot(worker.attempt_id)


def _ended_with_torchrun(draft: PlanDraft, worker: Worker) -> bool:
    """Return whether the failure is counted already: after one ``torchrun`` gives up, the others exit too."""
    if draft.spec.rendezvous != c.C10D or worker.cause != Cause.APPLICATION:
        return False
    moment = worker.since or draft.now
    return any(timedelta(0) <= moment - incident.detected <= c.TORCHRUNS_END for incident in draft.status.incidents)


def _count_startup_failure(draft: PlanDraft, worker: Worker) -> PlanDraft:
    """Count a worker that was in no world: only if it exited by itself, and once for all pods created together.

    What happens to it while the job recovers, or before the loss of a member is counted, is part of that incident.
    """
    if worker.reason == StartupReason.POD_REFUSED:
        return draft  # nothing of it ran: ``startup_problems.pause`` handles it
    if draft.idle(worker):
        draft = draft.changed_worker(worker, counted=True)
        return draft.with_event(WorkerReason.SPARE_LOST, messages.workers.spare_lost(worker.message), warning=True)
    failed = causes.fails(worker.exit_code, launched=draft.spec.launched) or worker.reason == FailureReason.EVICTED
    crashed = failed and worker.cause != Cause.INTERRUPTION
    if not crashed or worker.batch <= draft.status.counted_batch:
        return draft.changed_worker(worker, counted=True)
    if worker.cause not in WITH_BACKOFF:
        if any(incident.resumed is None for incident in draft.status.incidents):
            wait = timedelta(seconds=draft.spec.backoff.seconds(1))
            return draft.changed_worker(worker, counted=True).with_status(backoff_until=draft.now + wait)
        if _members_not_counted(draft):
            return draft.requeue_in(c.POLL_OPEN)
    attempt_id = AttemptId(generation=draft.status.membership.generation, attempt=0)
    draft = _record_observed(draft.changed_worker(worker, counted=True), worker, attempt_id)
    return draft.with_status(counted_batch=worker.batch)


def _record_observed(draft: PlanDraft, worker: Worker, attempt_id: AttemptId) -> PlanDraft:
    # If no launcher is left, lost steps are counted from here.
    draft = newest_progress(draft, force=True)
    incident = _observed_incident(draft, worker, attempt_id)
    return record(draft, incident, evidence.of_incident(draft, worker, None, incident.detected), worker)


def _members_not_counted(draft: PlanDraft) -> bool:
    ended = draft.status.in_phase(Phase.LOST, Phase.ENDED)
    return any(worker.cause and worker.attempt_id and not worker.counted and not worker.ordered for worker in ended)


def _live_launcher_will_report(draft: PlanDraft, worker: Worker) -> bool:
    """Return whether a launcher of its world is alive and will report the loss."""
    if not draft.spec.launched:
        return False
    for other in draft.status.in_phase(Phase.WANTED, Phase.LEAVING):
        report = draft.seen.report(other.pod_uid)
        if other.attempt_id is not None and report is not None and report.fresh(draft.now):
            return True
    return not draft.seen.warmed_up(draft.now) and bool(draft.status.in_phase(Phase.WANTED))


def _observed_incident(draft: PlanDraft, worker: Worker, attempt_id: AttemptId) -> Incident:
    return Incident(
        number=0,
        attempt_id=attempt_id,
        cause=worker.cause or Cause.INFRASTRUCTURE,
        action="Replace",
        reason=worker.reason,
        message=worker.message,
        pod=pod_name(draft.seen.job.name, worker.incarnation),
        rank=None,
        node=worker.node or None,
        detected=worker.since or draft.now,
    )


def _drop_expired(draft: PlanDraft) -> PlanDraft:
    """Drop incidents older than their budget's window, which no longer count."""
    kept = []
    for count in draft.status.incidents_by_cause:
        budget = draft.spec.budget(count.cause)
        window = budget.window_seconds if budget else c.DEFAULT_WINDOW_SECONDS
        kept.append(replace(count, times=count.within(draft.now, window)))
    return draft.with_status(incidents_by_cause=tuple(kept))


def _close_recovered(draft: PlanDraft) -> PlanDraft:
    """Close incidents that no launcher is left to close, once a later world has completed a step.

    A launcher that still reports the incident also reports its end and the steps lost. Without such a launcher, lost
    steps are counted from the last step that was reported before.
    """
    reported = _reported_by_live_launchers(draft)
    for incident in draft.status.incidents:
        if incident.resumed is not None:
            continue
        draft = draft.requeue_in(c.POLL_OPEN)
        if incident.attempt_id in reported and draft.now - incident.detected < c.ACKNOWLEDGE_AFTER:
            continue
        later = _first_completed_step(draft, incident)
        if later is not None:
            draft = updated(draft, incident, _closed_by_progress(draft, incident, *later))
    return draft


def _reported_by_live_launchers(draft: PlanDraft) -> set[AttemptId]:
    """Return the attempt IDs that live launchers report. Other launchers never report the end of an incident."""
    living = {pod.uid for pod in draft.seen.pods if not (pod.terminal or pod.absent)}
    reports = (report for report in draft.seen.reports if report.pod_uid in living and report.fresh(draft.now))
    return {item.attempt_id for report in reports for item in report.incidents}


def _first_completed_step(draft: PlanDraft, incident: Incident) -> tuple[datetime, Report] | None:
    committed = [
        (report.committed_at, report)
        for report in draft.seen.reports
        if report.world and report.world.attempt_id > incident.attempt_id and report.committed_at
    ]
    later = [(time, report) for time, report in committed if time > incident.detected]
    return min(later, key=lambda found: found[0], default=None)


def _may_be_older_world(incident: Incident, report: Report) -> bool:
    """Return whether this world may be older than the incident. Its start then does not prove a recovery."""
    of_no_world = incident.attempt_id.attempt == 0
    return (
        of_no_world
        and report.world is not None
        and report.world.attempt_id.generation == incident.attempt_id.generation
    )


def _closed_by_progress(draft: PlanDraft, incident: Incident, resumed: datetime, report: Report) -> Incident:
    restored, reached = report.restored, draft.status.progress
    if restored is None or _may_be_older_world(incident, report):
        return replace(incident, resumed=resumed)
    before = reached is not None and reached.time is not None and reached.time < resumed
    lost = max(0, reached.step - restored.step) if reached is not None and before else None
    return replace(
        incident,
        resumed=resumed,
        lost_steps=incident.lost_steps if incident.lost_steps is not None else lost,
        restored_from=incident.restored_from or restored.origin,
    )
