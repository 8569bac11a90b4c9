"""Workers that cannot start. The operator reports each problem at once, with its fix, and fails the job only after
the startup deadline.

Later tries may succeed, for example after an image is pushed or a quota is raised. A problem never ends a job that
trains, or one that has trained and only lacks capacity.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from holdfast_operator.api import names as c
from holdfast_operator.api.reasons import StartupReason, WaitReason
from holdfast_operator.api.status import ConditionType, Phase, StartupProblem, Worker, reason_word, say
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures.avoided_nodes import avoiding
from holdfast_operator.decision.failures.backoff import start_retry
from holdfast_operator.decision.lifecycle.finished import finish
from holdfast_operator.decision.reporting import messages
from holdfast_operator.decision.reporting.progress import newest_report
from holdfast_operator.decision.set_condition import Reason
from holdfast_operator.decision.workers import preflight
from holdfast_operator.decision.workers.replicas import unplaced
from holdfast_operator.scheduling.capacity import no_node
from holdfast_operator.views import PodView

_PULL = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
)
_CONFIG = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_NAMED = 5
_ROOM = frozenset(
    {
        StartupReason.UNSCHEDULABLE,
        StartupReason.QUOTA_EXCEEDED,
        StartupReason.NO_SCHEDULER_RESPONSE,
        StartupReason.CREATION_FAILED,
    }
)
_VOLUME_EVENTS = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
# Events of the kubelet for a bound pod whose containers are not created or do not start.
_START_EVENTS = frozenset(
    {
        "FailedCreatePodSandBox",
        "FailedCreatePodContainer",
        "FailedPostStartHook",
        "FailedPrepareDynamicResources",
        "NetworkNotReady",
    }
)
_NEVER_RAN = frozenset(
    {StartupReason.HOLDFAST_MISSING, StartupReason.CONTAINER_FAILED, StartupReason.INIT_CONTAINER_FAILED}
)


def apply(draft: PlanDraft) -> PlanDraft:
    """Update ``status.trouble`` from what is observed."""
    if draft.spec.suspend:
        return draft
    found = _find(draft)
    known = draft.status.trouble
    if found is None:
        draft = _slow(draft)
        return draft if known is None or not _over(draft) else draft.with_status(trouble=None)
    reason, message = reason_word(found.reason), say(found.message)
    if known is None or known.reason != reason:
        since = draft.now if known is None or _waits_for_room(draft, known) else known.since
        draft = draft.with_status(trouble=StartupProblem(reason=reason, message=message, since=since))
    elif known.message != message:
        draft = draft.with_status(trouble=replace(known, message=message))
    return _overdue(draft)


def _slow(draft: PlanDraft) -> PlanDraft:
    """Report what a start without a problem is waiting for."""
    for worker in draft.needed:
        pod = draft.pod(worker)
        if pod is not None and pod.held_by and not (pod.absent or pod.gated or worker.gated):
            words = Reason(WaitReason.WAITING_FOR_QUEUE, messages.capacity.waiting_for_gates(pod.name, pod.held_by))
            return replace(draft, hold=words).requeue_soon()
        if pod is not None and pod.pulling and not pod.absent:
            words = Reason(WaitReason.IMAGE_PULLING, messages.startup.image_pulling(pod.name, pod.pulling))
            return replace(draft, hold=words).requeue_soon()
    return draft


def _overdue(draft: PlanDraft) -> PlanDraft:
    trouble = draft.status.trouble
    if trouble is None or newest_report(draft) is not None:
        return draft
    if _waits_for_room(draft, trouble):
        return draft.requeue_soon()
    if not draft.seen.warmed_up(draft.now):
        # The operator has just started: the report of a running world may still arrive.
        return draft.requeue_soon()
    since = trouble.since
    if draft.status.membership.active is not None:
        # The job has trained, so the deadline starts when training stopped. Between two worlds there is no report.
        since = max(since, draft.status.stalled_since or draft.now)
    deadline = since + timedelta(seconds=draft.spec.startup_deadline_seconds)
    if draft.now < deadline:
        return draft.requeue_at(deadline).requeue_soon()
    limit = draft.spec.startup_deadline_seconds
    return finish(
        draft, ConditionType.FAILED, trouble.reason, messages.startup.start_deadline(trouble.message, limit)
    )


def _waits_for_room(draft: PlanDraft, trouble: StartupProblem) -> bool:
    """Return whether a job that has trained lacks capacity. Its template is valid, so it may wait."""
    return draft.status.membership.active is not None and trouble.reason in _ROOM


def _over(draft: PlanDraft) -> bool:
    """Return whether all workers run, so that the problem is solved."""
    pods = [draft.pod(worker) for worker in draft.needed]
    return bool(pods) and all(pod is not None and pod.phase == "Running" and not pod.waiting for pod in pods)


def _find(draft: PlanDraft) -> Reason | None:
    if draft.seen.refusal is not None and not _only_spares_lack(draft):
        return Reason(draft.seen.refusal.reason, draft.seen.refusal.message)
    workers = draft.needed
    placed = any(worker.node for worker in workers)
    impossible = "" if placed else no_node(draft.spec.pod_spec, draft.seen.nodes)
    if impossible:
        return Reason(StartupReason.UNSCHEDULABLE, impossible)
    for worker in workers:
        pod = draft.pod(worker)
        words = _of_pod(pod) if pod is not None and not pod.absent else None
        if words is not None:
            return words
    return _start_failed(draft) or _unscheduled(draft) or _unheard(draft) or preflight.held(draft)


def _only_spares_lack(draft: PlanDraft) -> bool:
    """Return whether the quota suffices for the workers but not for the spares."""
    return bool(draft.spec.spares) and all(worker.known for worker in draft.needed)


def _of_pod(pod: PodView) -> Reason | None:
    for container, reason, message in pod.waiting:
        if reason in _PULL:
            told = messages.startup.image_pull_failed(container, pod.name, message or reason)
            return Reason(StartupReason.IMAGE_PULL_FAILED, told)
        if reason in _CONFIG:
            told = messages.startup.container_not_created(container, pod.name, message or reason)
            return Reason(StartupReason.CONTAINER_CONFIG_ERROR, told)
        if reason == "CrashLoopBackOff" and pod.running_since is None:
            told = messages.startup.container_crashes(container, pod.name, message)
            return Reason(StartupReason.CONTAINER_CRASHES, told)
    for reason, note in () if pod.terminal else pod.warnings:
        if reason in _VOLUME_EVENTS:
            return Reason(StartupReason.VOLUME_FAILED, messages.startup.volume_failed(pod.name, note))
        if reason in _START_EVENTS:
            return Reason(StartupReason.POD_START_FAILED, messages.startup.pod_start_failed(pod.name, pod.node, note))
    if "persistentvolumeclaim" in pod.unschedulable:
        return Reason(StartupReason.VOLUME_MISSING, messages.startup.volume_missing(pod.name, pod.unschedulable))
    if pod.unschedulable and not pod.nominated:
        return Reason(StartupReason.UNSCHEDULABLE, messages.startup.unschedulable(pod.name, pod.unschedulable))
    return None


def _unscheduled(draft: PlanDraft) -> Reason | None:
    """Detect pods that no scheduler has handled. Jobs in a queue are skipped: their admission has no time."""
    for worker in () if draft.spec.scheduling.queue else draft.needed:
        pod = draft.pod(worker)
        if pod is None or pod.absent or pod.terminal or pod.leaving or pod.gated or pod.held_by:
            continue
        if pod.bound or pod.nominated:
            continue
        since = max(filter(None, (worker.since, draft.status.gang.lifted_at)), default=draft.now)
        if draft.now - since >= draft.timings.scheduler_heard:
            return Reason(StartupReason.NO_SCHEDULER_RESPONSE, _why_unscheduled(draft, pod))
    return None


def _why_unscheduled(draft: PlanDraft, pod: PodView) -> str:
    """Return the newest warning of any component; without one, report the scheduler."""
    if pod.warnings:
        reason, note = pod.warnings[-1]
        return messages.startup.unscheduled(pod.name, reason, note)
    return messages.startup.no_scheduler_response(
        pod.name, draft.spec.pod_spec.get("schedulerName") or "default-scheduler"
    )


def _unheard(draft: PlanDraft) -> Reason | None:
    """Detect running containers whose sidecars have never received anything from a launcher."""
    silent = [pod for worker in draft.needed if (pod := draft.pod(worker)) and _mute(draft, worker, pod)]
    if not silent:
        return None
    if not draft.seen.warmed_up(draft.now):
        return _as_said(draft)
    names = ", ".join(pod.name for pod in silent[:_NAMED]) + (", …" if len(silent) > _NAMED else "")
    reports = [draft.seen.report(pod.uid) for pod in silent]
    heard = any(report is not None and report.fresh(draft.now) for report in reports)
    message = (messages.startup.no_launcher if heard else messages.startup.no_sidecar)(names)
    return Reason(StartupReason.NO_LAUNCHER_DETECTED, message)


def _as_said(draft: PlanDraft) -> Reason | None:
    """Keep an earlier result while this operator has just started: it cannot confirm or withdraw it yet."""
    known = draft.status.trouble
    return (
        Reason(known.reason, known.message) if known and known.reason == StartupReason.NO_LAUNCHER_DETECTED else None
    )


def _mute(draft: PlanDraft, worker: Worker, pod: PodView) -> bool:
    report = draft.seen.report(pod.uid)
    heard = worker.ready_at is not None or (report is not None and report.has_launcher)
    running = pod.running_since if not (heard or pod.absent or pod.terminal or pod.leaving) else None
    return running is not None and draft.now - running >= draft.timings.launcher_heard


def _start_failed(draft: PlanDraft) -> Reason | None:
    """Return why the newest batch could not start its trainer."""
    ended = [worker for worker in draft.status.in_phase(Phase.ENDED) if _cannot_start(worker)]
    if not ended:
        return None
    newest = max(ended, key=lambda worker: worker.incarnation)
    later = [worker for worker in draft.status.workers if worker.batch > newest.batch]
    if any(worker.ready_at is not None for worker in later):
        return None
    return Reason(newest.reason, newest.message)


def pause(draft: PlanDraft) -> PlanDraft:
    """Delay the next try of workers that cannot start, and avoid a node whose kubelet refused one."""
    ended = [worker for worker in draft.status.in_phase(Phase.ENDED) if not worker.counted and _cannot_start(worker)]
    for worker in ended:
        draft = draft.changed_worker(worker, counted=True).with_status(backoff_until=draft.now + start_retry(draft))
        draft = _refused(draft, worker) if worker.reason == StartupReason.POD_REFUSED else draft
    return draft


def _cannot_start(worker: Worker) -> bool:
    """Return whether the worker never ran. A pod refused later, as after a kubelet restart, is an incident."""
    refused = worker.reason == StartupReason.POD_REFUSED and worker.attempt_id is None
    return refused or (not worker.cause and worker.reason in _NEVER_RAN)


def _refused(draft: PlanDraft, worker: Worker) -> PlanDraft:
    """Avoid the node, unless every kubelet refuses such a pod or the job needs the node."""
    taken = any(pod.phase == "Running" for other in draft.needed if (pod := draft.pod(other)) is not None)
    avoided = sum(entry.reason == StartupReason.POD_REFUSED for entry in draft.status.avoided)
    blamed = bool(worker.node) and (taken or avoided < c.REFUSING_NODES)
    if not blamed or not draft.can_place_elsewhere(worker.node, unplaced(draft)):
        return draft.with_event(worker.reason, worker.message, warning=True)
    minutes = c.AVOID_REFUSED.total_seconds() / 60
    told = messages.workers.pod_refused_avoiding(worker.message, minutes)
    draft = avoiding(draft, worker.node, StartupReason.POD_REFUSED, c.AVOID_REFUSED)
    return draft.with_event(worker.reason, told, warning=True)
