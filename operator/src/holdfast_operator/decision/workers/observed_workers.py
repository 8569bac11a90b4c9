"""Record facts: the pod of each worker, its node, and the worlds that it was in. This policy decides nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.child_names import pod_name
from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.status import Phase, Worker
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.workers import preflight
from holdfast_operator.decision.workers.fencing import left_in_time
from holdfast_operator.views import PodView


def apply(draft: PlanDraft) -> PlanDraft:
    """Record the observed facts of each worker."""
    if draft.status.start_time is None and not draft.spec.suspend:
        draft = draft.with_status(start_time=draft.now)
    draft = _adopted(draft)
    workers = tuple(_facts(draft, worker) for worker in draft.status.workers)
    return draft.with_status(workers=workers, selector=f"{c.LABEL_JOB}={draft.seen.job.name}")


def _adopted(draft: PlanDraft) -> PlanDraft:
    """Add the job's pods that the status does not list, as after a restored backup, so that none is replaced."""
    known = {worker.incarnation for worker in draft.status.workers}
    unknown = [
        pod for pod in draft.seen.pods if not pod.absent and pod.incarnation >= 0 and pod.incarnation not in known
    ]
    if not unknown:
        return draft
    adopted = tuple(_adopt(draft, pod) for pod in sorted(unknown, key=lambda pod: pod.incarnation))
    least = max(worker.incarnation for worker in adopted) + 1
    return draft.with_status(
        workers=(*draft.status.workers, *adopted), incarnations=max(draft.status.incarnations, least)
    )


def _adopt(draft: PlanDraft, pod: PodView) -> Worker:
    phase = Phase.ENDED if pod.terminal else Phase.WANTED
    return Worker(
        incarnation=pod.incarnation,
        batch=pod.incarnation,
        phase=phase,
        gated=pod.gated,
        pod_uid=pod.uid,
        node=pod.node,
        since=draft.now,
        exit_code=pod.exit_code,
        # Its end was counted before.
        counted=pod.terminal,
    )


def _facts(draft: PlanDraft, worker: Worker) -> Worker:
    if worker.phase is Phase.ENDED:
        return worker
    pod = _its_pod(draft, worker)
    if pod is None or pod.absent:
        worker = _absent(draft, worker, pod)
        return _seen_in(draft, worker if pod is None else _placed(draft, worker, pod))
    return _seen_in(draft, _placed(draft, _with(worker, pod_uid=pod.uid, absent_since=None), pod))


def _its_pod(draft: PlanDraft, worker: Worker) -> PodView | None:
    if worker.known:
        return draft.pod(worker)
    named = draft.seen.pod_named(pod_name(draft.seen.job.name, worker.incarnation))
    return named if named is not None and named.incarnation == worker.incarnation else None


def _absent(draft: PlanDraft, worker: Worker, pod: PodView | None) -> Worker:
    if not worker.known or (worker.absent_since is not None and pod is None):
        return worker
    since = worker.absent_since or draft.now
    return _with(worker, absent_since=since, left_in_time=left_in_time(draft, worker, pod, since))


def _placed(draft: PlanDraft, worker: Worker, pod: PodView) -> Worker:
    worker = _with(worker, grace_seconds=pod.grace_seconds)
    if not pod.bound:
        return worker
    node = draft.seen.node(pod.node)
    return _with(
        worker,
        node=pod.node,
        boot_id=worker.boot_id or (node.boot_id if node else ""),
        bound_at=worker.bound_at or draft.now,
    )


def _with(worker: Worker, **facts: Any) -> Worker:
    """Return the worker with these facts; return the same object if none changed, as in most passes."""
    known = all(getattr(worker, name) == value for name, value in facts.items())
    return worker if known else replace(worker, **facts)


def _seen_in(draft: PlanDraft, worker: Worker) -> Worker:
    """Return the worker with the highest world that any report places it in, and the time when it was first ready.

    A reported incident that names the worker as lost also places it in that world, even if the operator missed that.
    """
    attempt_ids: list[AttemptId] = [worker.attempt_id] if worker.attempt_id else []
    own = draft.seen.report(worker.pod_uid)
    if own is not None and own.started is not None and own.accepted is not None:
        # A launcher that leaves may report an attempt that started without it.
        attempt_ids.append(min(own.started, own.accepted))
    if own is not None and own.ready and worker.ready_at is None and preflight.admits(draft, own):
        worker = replace(worker, ready_at=draft.now)
    worlds = [report.world for report in draft.seen.reports if report.world is not None]
    attempt_ids += [world.attempt_id for world in worlds if worker.pod_uid in world.members]
    if not attempt_ids:
        name = pod_name(draft.seen.job.name, worker.incarnation)
        attempt_ids += [
            told.attempt_id for report in draft.seen.reports for told in report.incidents if told.pod == name
        ]
    return _with(worker, attempt_id=max(attempt_ids, default=None))
