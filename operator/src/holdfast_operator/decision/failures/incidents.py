"""Incidents: each failure once, identified by the pair that it ended.

Launchers that live on report a failure themselves, all under the same pair. The operator adds those that nobody is
left to report, and knows better only who ordered a deletion and which node died. What is older than all that is
remembered was counted before.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from holdfast_operator.api import names as c
from holdfast_operator.api.child_names import pod_name
from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.reasons import (
    CAUSES,
    SYMPTOMS,
    WITH_BACKOFF,
    Cause,
    FailureReason,
    JobReason,
    LauncherReason,
    StartupReason,
    WorkerReason,
)
from holdfast_operator.api.status import Incident, Phase, Worker, reason_word, say
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures import causes, evidence, oom
from holdfast_operator.decision.failures.record_incident import judged_anew, record
from holdfast_operator.decision.plan import RecoveryMetric
from holdfast_operator.decision.reporting import messages
from holdfast_operator.decision.reporting.progress import newest_progress
from holdfast_operator.views import Report, ReportedIncident

# Launchers report these for an end whose reason they do not know.
_BLIND = frozenset({LauncherReason.MEMBER_LOST, LauncherReason.DRAINED})
# How a container that was sent SIGTERM ended, and not why it was sent.
_HOW = frozenset({FailureReason.DRAINED_ON_REQUEST, FailureReason.KILLED})


def apply(draft: PlanDraft) -> PlanDraft:
    """Record what launchers report, then what only the operator can know; close what was recovered from."""
    for told in _told(draft):
        draft = _take(draft, told)
    for worker in draft.status.in_phase(Phase.LOST, Phase.ENDED, Phase.LEAVING):
        draft = _of_worker(draft, worker)
    return _resumed(_windows(draft))


def _told(draft: PlanDraft) -> list[ReportedIncident]:
    found = [told for report in draft.seen.reports for told in report.incidents]
    return sorted(found, key=lambda told: told.pair)


def _take(draft: PlanDraft, told: ReportedIncident) -> PlanDraft:
    if draft.status.forgot(told.pair):
        return draft
    known = next((incident for incident in draft.status.incidents if incident.pair == told.pair), None)
    if known is not None:
        draft, known = oom.informed(draft, known, told, _worker_of(draft, _as_told(draft, told)))
        return _completed(draft, known, told)
    if oom.taken_in(draft, told):
        known = oom.whole(draft, told)
        return draft if known is None else _prolonged(draft, known, told)
    given_up = loss_before(draft, told)
    if given_up is not None:
        return _prolonged(draft, given_up, told)
    incident = _as_told(draft, told)
    twin = _symptom_of(draft, incident)
    if twin is not None:
        changed = replace(twin, pair=told.pair, resumed=None, lost_steps=None, restored_from=None)
        return _completed(_replaced(draft, twin, changed), changed, told)
    worker = _worker_of(draft, incident)
    if _end_is_due(draft, told, worker):
        return draft.requeue_in(c.POLL_OPEN)
    draft = record(draft, incident, evidence.of_incident(draft, worker, told, incident.detected), worker)
    return _completed(draft, draft.status.incidents[-1], told)


def loss_before(draft: PlanDraft, told: ReportedIncident) -> Incident | None:
    """The counted loss of this very pod: cut off, it was given up, came back, and left again as it was deleted.

    A worker that is forgotten had all its losses counted.
    """
    worker = _worker_of(draft, _as_told(draft, told))
    gone = worker is None or (worker.counted and worker.phase in (Phase.LOST, Phase.ENDED))
    if told.pod is None or not gone:
        return None
    return next((known for known in reversed(draft.status.incidents) if _earlier(known, told)), None)


def _earlier(known: Incident, told: ReportedIncident) -> bool:
    return known.pod == told.pod and known.pair < told.pair


def _symptom_of(draft: PlanDraft, incident: Incident) -> Incident | None:
    """What was seen of the pod a moment before it failed is that failure, and has been counted.

    So is a fault of its GPUs that was counted for another pod which shows it too.
    """
    faults = evidence.faults(draft, incident.pod, incident.detected)
    for known in reversed(draft.status.incidents):
        here = known.pod == incident.pod or bool(faults & evidence.faults(draft, known.pod, known.detected))
        shown = known.pair.attempt == 0 and known.reason in SYMPTOMS and here
        if shown and abs(incident.detected - known.detected) <= c.SAME_FAILURE:
            return known
    return None


def _end_is_due(draft: PlanDraft, told: ReportedIncident, worker: Worker | None) -> bool:
    """Launchers see at once that one is gone or was sent SIGTERM; its container's end, a moment later, says why."""
    blind = told.reason in _BLIND
    if not blind or told.detected is None or worker is None or worker.phase is not Phase.WANTED:
        return False
    return timedelta(0) <= draft.now - told.detected < c.END_SEEN


def _as_told(draft: PlanDraft, told: ReportedIncident) -> Incident:
    incident = Incident(
        number=0,
        pair=told.pair,
        cause=told.cause if told.cause in CAUSES else Cause.INFRASTRUCTURE,
        action=told.action or "Restart",
        reason=reason_word(told.reason),
        message=say(told.message),
        pod=told.pod,
        rank=told.rank,
        node=told.node,
        detected=told.detected or draft.now,
    )
    return _corrected(draft, incident)


def _corrected(draft: PlanDraft, incident: Incident) -> Incident:
    """Launchers see a peer vanish or a SIGTERM; who deleted it, whose node died or what it exceeded is known here."""
    worker = _worker_of(draft, incident)
    if incident.cause not in (Cause.INFRASTRUCTURE, Cause.INTERRUPTION) or worker is None:
        return incident
    knows = worker.cause in (Cause.INFRASTRUCTURE, Cause.INTERRUPTION, Cause.OOM)
    if worker.phase is Phase.WANTED or not (knows or worker.reason == FailureReason.EVICTED):
        return incident
    if incident.reason != LauncherReason.DRAINED:
        return incident if worker.cause == incident.cause else _as_of(incident, worker)
    return incident if worker.reason in _HOW else _as_of(incident, worker)


def _as_of(incident: Incident, worker: Worker) -> Incident:
    return replace(incident, cause=worker.cause, reason=worker.reason, message=worker.message)


def _worker_of(draft: PlanDraft, incident: Incident) -> Worker | None:
    job = draft.seen.job.name
    return next((worker for worker in draft.status.workers if f"{job}-w{worker.incarnation}" == incident.pod), None)


def _completed(draft: PlanDraft, known: Incident, told: ReportedIncident) -> PlanDraft:
    """Take what was not known before; what is recorded stays."""
    changed = replace(
        known,
        resumed=known.resumed or told.resumed,
        lost_steps=known.lost_steps if known.lost_steps is not None else told.lost_steps,
        restored_from=known.restored_from or told.restored_from,
        rank=known.rank if known.rank is not None else told.rank,
        node=known.node or told.node,
    )
    return _replaced(draft, known, changed)


def _prolonged(draft: PlanDraft, known: Incident, told: ReportedIncident) -> PlanDraft:
    """It began with another attempt: what ended this one is the same failure, which lasts until training goes on."""
    lost = [steps for steps in (known.lost_steps, told.lost_steps) if steps is not None]
    later = max(filter(None, (known.resumed, told.resumed)), default=None)
    return _replaced(draft, known, replace(known, resumed=later, lost_steps=max(lost, default=None)))


def _replaced(draft: PlanDraft, known: Incident, changed: Incident) -> PlanDraft:
    if changed == known:
        return draft
    kept = tuple(changed if incident is known else incident for incident in draft.status.incidents)
    draft = draft.with_status(incidents=kept)
    if known.resumed is None and changed.resumed is not None:
        seconds = (changed.resumed - changed.detected).total_seconds()
        recovered = RecoveryMetric(cause=changed.cause, seconds=max(0.0, seconds), lost_steps=changed.lost_steps or 0)
        draft = replace(draft, recovered=(*draft.recovered, recovered))
        message = messages.resumed(
            seconds,
            changed.reason,
            launched=draft.spec.launched,
            lost_steps=changed.lost_steps,
            origin=changed.restored_from or "",
        )
        draft = draft.with_event(JobReason.TRAINING_RESUMED, message)
    return draft


def _of_worker(draft: PlanDraft, worker: Worker) -> PlanDraft:
    if worker.counted or worker.ordered or not worker.cause or worker.phase is Phase.LEAVING:
        return draft
    if _covered(draft, worker):
        return _explained(draft, worker).changed_worker(worker, counted=True)
    if worker.pair is None:
        return _at_startup(draft, worker)
    since, told = worker.since or draft.now, oom.told_of(draft, worker)
    if told is None and _somebody_reports(draft, worker) and draft.now - since < c.INCIDENT_GRACE:
        return draft.requeue_at(since + c.INCIDENT_GRACE)
    known = told or oom.of_container(draft, worker)
    draft = _recorded(draft, worker, worker.pair) if known is None else _last_part(draft, known, worker)
    return draft.changed_worker(worker, counted=True)


def _last_part(draft: PlanDraft, known: Incident, worker: Worker) -> PlanDraft:
    """The container's end says more than its processes' did."""
    moment = worker.since or draft.now
    return judged_anew(draft, known, known, evidence.of_incident(draft, worker, None, moment), worker)[0]


def _explained(draft: PlanDraft, worker: Worker) -> PlanDraft:
    """Why a launcher was sent SIGTERM is in its pod's last status, maybe long after it reported that it leaves."""
    name = pod_name(draft.seen.job.name, worker.incarnation)
    of_pod = (
        known for known in draft.status.incidents if (known.pod, known.reason) == (name, LauncherReason.DRAINED)
    )
    known = next((known for known in of_pod if worker.pair is not None and known.pair >= worker.pair), None)
    changed = _corrected(draft, known) if known is not None and worker.phase is Phase.ENDED else known
    if known is None or changed is None or changed == known:
        return draft
    found = evidence.of_incident(draft, worker, None, known.detected)
    draft, known = judged_anew(draft, known, changed, found, worker)
    return draft.with_event(known.reason, f"{known.cause}: {known.message}", warning=True)


def _covered(draft: PlanDraft, worker: Worker) -> bool:
    """An incident of the world that it was in, or a later one that names it, is recorded."""
    if worker.pair is None:
        return False
    if _taken_along(draft, worker):
        return True
    name = f"{draft.seen.job.name}-w{worker.incarnation}"
    return any(
        incident.pair == worker.pair or (incident.pod == name and incident.pair >= worker.pair)
        for incident in draft.status.incidents
    ) or draft.status.forgot(worker.pair)


def _taken_along(draft: PlanDraft, worker: Worker) -> bool:
    """A ``torchrun`` that gives up takes the others with it, one after the other."""
    if draft.spec.rendezvous != c.C10D or worker.cause != Cause.APPLICATION:
        return False
    moment = worker.since or draft.now
    return any(timedelta(0) <= moment - incident.detected <= c.TORCHRUNS_END for incident in draft.status.incidents)


def _at_startup(draft: PlanDraft, worker: Worker) -> PlanDraft:
    """It was in no world. Only what ended by itself counts, and once for all that were made together.

    What was done to it while the job recovers, or while a member's loss is yet to be counted, is part of that.
    """
    if worker.reason == StartupReason.POD_REFUSED:
        return draft  # nothing of it ran: ``template.pause`` answers it
    if draft.idle(worker):
        draft = draft.changed_worker(worker, counted=True)
        return draft.with_event(WorkerReason.SPARE_LOST, messages.spare_lost(worker.message), warning=True)
    failed = causes.fails(worker.exit_code, launched=draft.spec.launched) or worker.reason == FailureReason.EVICTED
    crashed = failed and worker.cause != Cause.INTERRUPTION
    if not crashed or worker.batch <= draft.status.counted_batch:
        return draft.changed_worker(worker, counted=True)
    if worker.cause not in WITH_BACKOFF:
        if any(incident.resumed is None for incident in draft.status.incidents):
            wait = timedelta(seconds=draft.spec.backoff.seconds(1))
            return draft.changed_worker(worker, counted=True).with_status(backoff_until=draft.now + wait)
        if _members_to_count(draft):
            return draft.requeue_in(c.POLL_OPEN)
    pair = AttemptId(generation=draft.status.membership.generation, attempt=0)
    draft = _recorded(draft.changed_worker(worker, counted=True), worker, pair)
    return draft.with_status(counted_batch=worker.batch)


def _recorded(draft: PlanDraft, worker: Worker, pair: AttemptId) -> PlanDraft:
    # Should no launcher be left, this is from where the steps are counted that were lost.
    draft = newest_progress(draft, force=True)
    incident = _seen_here(draft, worker, pair)
    return record(draft, incident, evidence.of_incident(draft, worker, None, incident.detected), worker)


def _members_to_count(draft: PlanDraft) -> bool:
    ended = draft.status.in_phase(Phase.LOST, Phase.ENDED)
    return any(worker.cause and worker.pair and not worker.counted and not worker.ordered for worker in ended)


def _somebody_reports(draft: PlanDraft, worker: Worker) -> bool:
    """A launcher that was in its world lives on, so it will tell."""
    if not draft.spec.launched:
        return False
    for other in draft.status.in_phase(Phase.WANTED, Phase.LEAVING):
        report = draft.seen.report(other.pod_uid)
        if other.pair is not None and report is not None and report.fresh(draft.now):
            return True
    return not draft.seen.warmed_up(draft.now) and bool(draft.status.in_phase(Phase.WANTED))


def _seen_here(draft: PlanDraft, worker: Worker, pair: AttemptId) -> Incident:
    return Incident(
        number=0,
        pair=pair,
        cause=worker.cause,
        action="Replace",
        reason=worker.reason,
        message=worker.message,
        pod=f"{draft.seen.job.name}-w{worker.incarnation}",
        rank=None,
        node=worker.node or None,
        detected=worker.since or draft.now,
    )


def _windows(draft: PlanDraft) -> PlanDraft:
    """Incidents older than their budget's window no longer count."""
    kept = []
    for count in draft.status.restarts:
        budget = draft.spec.budget(count.cause)
        window = budget.window_seconds if budget else c.DEFAULT_WINDOW_SECONDS
        kept.append(replace(count, times=count.within(draft.now, window)))
    return draft.with_status(restarts=tuple(kept))


def _resumed(draft: PlanDraft) -> PlanDraft:
    """Close what no launcher is left to close: a later world has committed a step since.

    Where a launcher still tells of the incident, it tells of the end as well, and of the steps lost. Where none does,
    they are counted from the last step that was reported before.
    """
    told = _told_by_the_living(draft)
    for incident in draft.status.incidents:
        if incident.resumed is not None:
            continue
        draft = draft.requeue_in(c.POLL_OPEN)
        if incident.pair in told and draft.now - incident.detected < c.ACKNOWLEDGE_AFTER:
            continue
        later = _first_commit(draft, incident)
        if later is not None:
            draft = _replaced(draft, incident, _as_seen(draft, incident, *later))
    return draft


def _told_by_the_living(draft: PlanDraft) -> set[AttemptId]:
    """A launcher that is gone tells of no end, and meanwhile the next world's steps are taken for those before it."""
    living = {pod.uid for pod in draft.seen.pods if not (pod.terminal or pod.absent)}
    reports = (report for report in draft.seen.reports if report.pod_uid in living and report.fresh(draft.now))
    return {item.pair for report in reports for item in report.incidents}


def _first_commit(draft: PlanDraft, incident: Incident) -> tuple[datetime, Report] | None:
    committed = [
        (report.committed_at, report)
        for report in draft.seen.reports
        if report.world and report.world.pair > incident.pair and report.committed_at
    ]
    later = [(time, report) for time, report in committed if time > incident.detected]
    return min(later, key=lambda found: found[0], default=None)


def _trained_on(incident: Incident, report: Report) -> bool:
    """No world ended by it, as far as is known, so this one may be older, and from where it began tells nothing."""
    of_no_world = incident.pair.attempt == 0
    return of_no_world and report.world is not None and report.world.pair.generation == incident.pair.generation


def _as_seen(draft: PlanDraft, incident: Incident, resumed: datetime, report: Report) -> Incident:
    restored, reached = report.restored, draft.status.progress
    if restored is None or _trained_on(incident, report):
        return replace(incident, resumed=resumed)
    before = reached is not None and reached.time is not None and reached.time < resumed
    lost = max(0, reached.step - restored.step) if reached is not None and before else None
    return replace(
        incident,
        resumed=resumed,
        lost_steps=incident.lost_steps if incident.lost_steps is not None else lost,
        restored_from=incident.restored_from or restored.origin,
    )
