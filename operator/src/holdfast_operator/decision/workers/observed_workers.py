"""Facts: which pod each worker has, where it runs, in which worlds it was. Decides nothing."""

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
    """Write down what was seen of each worker."""
    if draft.status.start_time is None and not draft.spec.suspend:
        draft = draft.with_status(start_time=draft.now)
    draft = _adopted(draft)
    workers = tuple(_facts(draft, worker) for worker in draft.status.workers)
    return draft.with_status(workers=workers, selector=f"{c.LABEL_JOB}={draft.seen.job.name}")


def _adopted(draft: PlanDraft) -> PlanDraft:
    """Pods of ours that the status does not know, as after a restored backup: nothing that trains is doubled."""
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
        # How it ended was counted by whoever knew it.
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
    """The worker itself where nothing is new: a pass looks at each, and most have no news."""
    known = all(getattr(worker, name) == value for name, value in facts.items())
    return worker if known else replace(worker, **facts)


def _seen_in(draft: PlanDraft, worker: Worker) -> Worker:
    """The highest world that it was in, by its own word and that of others; and when it was first ready.

    Who was lost in a world was in it, also where the operator that saw it there was lost as well.
    """
    pairs: list[AttemptId] = [worker.pair] if worker.pair else []
    own = draft.seen.report(worker.pod_uid)
    if own is not None and own.started is not None and own.accepted is not None:
        # Launchers tell each other what has started: one that leaves may know of the world that goes on without it.
        pairs.append(min(own.started, own.accepted))
    if own is not None and own.ready and worker.ready_at is None and preflight.admits(draft, own):
        worker = replace(worker, ready_at=draft.now)
    worlds = [report.world for report in draft.seen.reports if report.world is not None]
    pairs += [world.pair for world in worlds if worker.pod_uid in world.members]
    if not pairs:
        name = pod_name(draft.seen.job.name, worker.incarnation)
        pairs += [told.pair for report in draft.seen.reports for told in report.incidents if told.pod == name]
    return _with(worker, pair=max(pairs, default=None))
