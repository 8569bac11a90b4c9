"""Lost workers. A worker is lost if one of these holds:

- its pod ended or does not exist
- its pod is silent on a node that stopped reporting
- its pod is unreachable (``network_partition``)
- its launcher hangs, as the sidecar reports

The kubelet proves that a pod ended. All other workers are assumed to be lost: the operator requests a replacement at
once, and ``fencing`` waits for the proof. The absence of reports alone never makes a worker lost.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_operator.api import names as c
from holdfast_operator.api.child_names import pod_name
from holdfast_operator.api.reasons import Cause, FailureReason
from holdfast_operator.api.status import Phase, Worker, reason_word, say
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures import causes
from holdfast_operator.decision.failures.avoided_nodes import avoiding
from holdfast_operator.decision.reporting import messages
from holdfast_operator.decision.workers.network_partition import cut_off
from holdfast_operator.views import PodView


def apply(draft: PlanDraft) -> PlanDraft:
    """Move workers to Lost or Ended, and back if one is found alive."""
    severed = cut_off(draft)
    for worker in draft.status.workers:
        if worker.phase is Phase.ENDED:
            continue
        pod = draft.pod(worker)
        if pod is None and not worker.known:
            continue
        draft = _judge(draft, worker, pod, severed)
    return draft


def _judge(draft: PlanDraft, worker: Worker, pod: PodView | None, severed: frozenset[str]) -> PlanDraft:
    if pod is not None and pod.terminal:
        return draft.with_worker(_ended(draft, worker, pod))
    if worker.absent_since is not None:
        return _vanished(draft, worker, pod)
    if pod is None:
        return draft
    if _silent(draft, worker, pod):
        return _silenced(draft, worker, pod)
    if worker.phase is Phase.WANTED and pod.uid in severed:
        return _severed(draft, worker, pod)
    if worker.phase is Phase.WANTED and _hangs(draft, pod):
        return _hung(draft, worker, pod)
    if worker.phase is Phase.LOST and _returned(draft, worker, pod):
        return draft.changed_worker(
            worker, phase=Phase.WANTED, since=draft.now, cause=None, reason="", message="", counted=False
        )
    return draft


def _ended(draft: PlanDraft, worker: Worker, pod: PodView) -> Worker:
    """Return the worker as ended. A worker that was leaving keeps its cause, unless it ran out of memory."""
    verdict = causes.of_exit(pod, draft.node(worker), draft.now, launched=draft.spec.launched)
    keeps = worker.phase in (Phase.LEAVING, Phase.LOST) and (worker.ordered or verdict.cause != Cause.OOM)
    worker = worker if keeps else _blamed(worker, verdict)
    return replace(
        worker,
        phase=Phase.ENDED,
        since=draft.now,
        exit_code=pod.exit_code,
        traceback=not keeps and bool(pod.exit and pod.exit.traceback),
        final=bool(pod.exit and pod.exit.final and not worker.ordered and not draft.idle(worker)),
    )


def _vanished(draft: PlanDraft, worker: Worker, pod: PodView | None) -> PlanDraft:
    if worker.phase is Phase.LOST:
        return draft
    if worker.phase is Phase.WANTED:
        shown = pod or PodView(
            name=pod_name(draft.seen.job.name, worker.incarnation),
            uid=worker.pod_uid,
            incarnation=-1,
            node=worker.node,
        )
        worker = _blamed(worker, causes.of_departure(shown, draft.node(worker), draft.now))
    if not worker.node:
        # It never had a node, so nothing of it ever ran.
        return draft.with_worker(replace(worker, phase=Phase.ENDED, since=draft.now))
    return draft.with_worker(replace(worker, phase=Phase.LOST, since=draft.now))


def _silent(draft: PlanDraft, worker: Worker, pod: PodView) -> bool:
    """Return whether the node stopped reporting, and the operator or the peers miss the pod as well."""
    if worker.phase is Phase.LOST or not pod.bound or not causes.node_dead(draft.node(worker), draft.now):
        return False
    peers = (report for report in draft.seen.reports if report.pod_uid != pod.uid and report.fresh(draft.now))
    if any(pod.uid in report.lost_members for report in peers):
        return True
    own = draft.seen.report(pod.uid)
    return draft.seen.warmed_up(draft.now) and (own is None or not own.fresh(draft.now))


def _silenced(draft: PlanDraft, worker: Worker, pod: PodView) -> PlanDraft:
    message = messages.workers.node_lost(pod.name, pod.node)
    if worker.phase is Phase.WANTED:
        verdict = causes.ExitCause(Cause.INFRASTRUCTURE, FailureReason.NODE_LOST, message)
        worker = _blamed(worker, verdict)
    draft = draft.with_worker(replace(worker, phase=Phase.LOST, since=draft.now))
    return avoiding(draft, pod.node, FailureReason.NODE_LOST, c.AVOID_DEAD)


def _severed(draft: PlanDraft, worker: Worker, pod: PodView) -> PlanDraft:
    """Mark the worker as lost. The kubelet still reports, so deleting the pod (``cleanup``) proves its end."""
    message = messages.workers.pod_unreachable(pod.name, pod.node, draft.timings.cut_off.total_seconds())
    verdict = causes.ExitCause(Cause.INFRASTRUCTURE, FailureReason.POD_UNREACHABLE, message)
    draft = draft.with_worker(replace(_blamed(worker, verdict), phase=Phase.LOST, since=draft.now))
    return avoiding(draft, pod.node, FailureReason.POD_UNREACHABLE, c.AVOID_DEAD)


def _hangs(draft: PlanDraft, pod: PodView) -> bool:
    """Return whether the launcher reported before and is silent now; one that has not started cannot hang."""
    own = draft.seen.report(pod.uid)
    if own is None or not own.has_launcher or not own.fresh(draft.now):
        return False
    return (own.silent_seconds or 0.0) >= draft.timings.launcher_hung.total_seconds()


def _hung(draft: PlanDraft, worker: Worker, pod: PodView) -> PlanDraft:
    """Mark the worker as lost. The node is healthy, so deleting the pod (``cleanup``) proves its end."""
    message = messages.workers.launcher_unresponsive(pod.name, draft.timings.launcher_hung.total_seconds())
    verdict = causes.ExitCause(Cause.INFRASTRUCTURE, FailureReason.LAUNCHER_UNRESPONSIVE, message)
    return draft.with_worker(replace(_blamed(worker, verdict), phase=Phase.LOST, since=draft.now))


def _returned(draft: PlanDraft, worker: Worker, pod: PodView) -> bool:
    """Return whether the worker is alive and keeps its place.

    A counted loss is replaced, except with ``Wait`` or while the job is suspended.
    """
    own = draft.seen.report(pod.uid)
    alive = own is not None and own.ready and own.fresh(draft.now) and not _hangs(draft, pod)
    replaced = worker.counted and draft.spec.on_failure != c.WAIT and not draft.spec.suspend
    return alive and not pod.leaving and not replaced and not causes.node_dead(draft.node(worker), draft.now)


def _blamed(worker: Worker, verdict: causes.ExitCause) -> Worker:
    return replace(worker, cause=verdict.cause, reason=reason_word(verdict.reason), message=say(verdict.message))
