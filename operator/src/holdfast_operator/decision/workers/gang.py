"""All workers of a gang start together, or none occupies a node.

Pods are created with a scheduling gate. All gates are removed together under these conditions:
- all pods exist
- the queue, if there is one, has admitted them
- the cluster has capacity for them and for the gangs ahead, if necessary by preemption of lower priorities

If not all pods are bound in time, all are deleted and the gang waits longer. Two half-placed jobs therefore never
block each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from holdfast_operator.api import names as c
from holdfast_operator.api.child_names import pod_name
from holdfast_operator.api.reasons import WaitReason, WorkerReason
from holdfast_operator.api.status import GangAttempt, Phase, Worker
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures.backoff import share
from holdfast_operator.decision.plan import CreatePod, LiftGate
from holdfast_operator.decision.reporting import messages
from holdfast_operator.decision.workers import rendezvous
from holdfast_operator.decision.workers.replicas import order_away
from holdfast_operator.manifests.pod import pod as pod_manifest
from holdfast_operator.scheduling.fit import place
from holdfast_operator.scheduling.gang_queue import GangQueue, standing_of
from holdfast_operator.scheduling.waiting_gang import GangPriority
from holdfast_operator.views import PodView


def time_out(draft: PlanDraft) -> PlanDraft:
    """Cancel a gang that was not bound in time, and workers that wait for an outdated reason, before replacements."""
    lifted_at = draft.status.gang.lifted_at
    unbound = [worker for worker in _gated(draft) if not worker.node]
    if lifted_at is not None and unbound:
        draft = _promised(draft, unbound)
        deadline = _deadline(draft.status.gang, lifted_at, draft.timings.gang_bind)
        draft = draft.requeue_at(deadline) if draft.now < deadline else _send_away(draft, len(unbound))
    return _outdated(_stranded(_give_back(draft)))


def _promised(draft: PlanDraft, unbound: list[Worker]) -> PlanDraft:
    """Record since when the scheduler has not nominated all of these. A nomination may be absent for a moment."""
    gang = draft.status.gang
    since = None if all(_nominated(draft, worker) for worker in unbound) else gang.unpromised_since or draft.now
    return draft if since == gang.unpromised_since else draft.with_status(gang=replace(gang, unpromised_since=since))


def _deadline(gang: GangAttempt, lifted_at: datetime, bind: timedelta) -> datetime:
    at_last = lifted_at + c.GANG_PREEMPT + bind
    return at_last if gang.unpromised_since is None else min(at_last, gang.unpromised_since + bind)


def _nominated(draft: PlanDraft, worker: Worker) -> bool:
    """Return whether the scheduler preempts other pods for it. These may take a while to leave."""
    pod = draft.pod(worker)
    return pod is not None and pod.nominated


def _send_away(draft: PlanDraft, missing: int) -> PlanDraft:
    gated = _gated(draft)
    named = draft.status.membership.named()
    if any(worker.pod_uid in named for worker in gated) or _enough(draft, len(gated) - missing)[1]:
        return _go_on_with_fewer(draft, gated, missing)
    wait = draft.status.gang.backoff
    message = messages.capacity.gang_timeout(missing, len(gated), _waited(draft), wait.seconds)
    return _taken_back(draft, gated, WorkerReason.GANG_TIMEOUT, message, wait)


def _waited(draft: PlanDraft) -> int:
    return int((draft.now - (draft.status.gang.lifted_at or draft.now)).total_seconds())


def _taken_back(
    draft: PlanDraft, gated: list[Worker], reason: WorkerReason, message: str, wait: timedelta
) -> PlanDraft:
    for worker in gated:
        draft = order_away(draft, worker, reason, message)
    gang = draft.status.gang
    gang = GangAttempt(attempts=gang.attempts + 1, since=gang.since, retry_at=draft.now + wait)
    return draft.with_status(gang=gang).with_event(reason, message, warning=True)


def _give_back(draft: PlanDraft) -> PlanDraft:
    """Release a partly admitted gang, as two gangs may each hold the quota that the other one needs.

    The wait differs between jobs, so that two that started together do not collide again.
    """
    gated, gang = _gated(draft), draft.status.gang
    held = _held(draft, gated)
    if gang.lifted_at is not None or not held or len(held) == len(gated) or _enough(draft, len(gated) - len(held))[1]:
        return draft
    begun = [time for time in (gang.retry_at, *(worker.since for worker in gated)) if time is not None]
    deadline = max(begun, default=draft.now) + c.QUEUE_PATIENCE
    if draft.now < deadline:
        return draft.requeue_at(deadline)
    wait = gang.backoff
    wait *= 1.0 + share(f"{draft.seen.job.uid}/{gang.attempts}")
    queue = _queue(draft, held)
    message = messages.capacity.queue_timeout(len(held), len(gated), queue, c.QUEUE_PATIENCE.seconds, wait.seconds)
    return _taken_back(draft, gated, WorkerReason.QUEUE_TIMEOUT, message, wait)


def _held(draft: PlanDraft, gated: list[Worker]) -> list[Worker]:
    """Return the workers whose pods also have a scheduling gate of another component."""
    return [worker for worker in gated if (pod := draft.pod(worker)) is not None and pod.held_by and not pod.absent]


def _queue(draft: PlanDraft, held: list[Worker]) -> str:
    """Return the queue, or the owner of the scheduling gates, that the workers wait for."""
    queue = draft.spec.scheduling.queue
    gates = {gate for worker in held if (pod := draft.pod(worker)) is not None for gate in pod.held_by}
    return f"queue {queue}" if queue else f"the owner of {', '.join(sorted(gates))}"


def _go_on_with_fewer(draft: PlanDraft, gated: list[Worker], missing: int) -> PlanDraft:
    """Continue with the bound workers, which are enough for a generation, and cancel the others."""
    message = messages.capacity.gang_shrunk(missing, len(gated), _waited(draft))
    for worker in gated:
        if worker.node:
            draft = draft.changed_worker(worker, gated=False)
        else:
            draft = order_away(draft, worker, WorkerReason.GANG_TIMEOUT, message)
    return draft.with_status(gang=GangAttempt()).with_event(WorkerReason.GANG_TIMEOUT, message, warning=True)


def _stranded(draft: PlanDraft) -> PlanDraft:
    """Cancel workers for the domain of a packed job that has no worker left there. The next gang includes them."""
    wanted = draft.status.in_phase(Phase.WANTED)
    if any(worker.node for worker in wanted):
        return draft
    for worker in wanted:
        if worker.domain and not worker.gated:
            draft = order_away(
                draft, worker, WorkerReason.TOPOLOGY_DOMAIN_EMPTY, messages.capacity.domain_empty(worker.domain)
            )
    return draft


def _outdated(draft: PlanDraft) -> PlanDraft:
    """Recreate an unscheduled replacement that avoids nodes which are healthy again."""
    avoided = {entry.node for entry in draft.status.avoided}
    held = _held(draft, list(draft.status.in_phase(Phase.WANTED)))  # these would lose their position in the queue
    for worker in draft.status.in_phase(Phase.WANTED):
        if (
            worker in held
            or worker.gated
            or worker.node
            or not worker.known
            or set(worker.avoid) <= avoided
            or worker.since is None
        ):
            continue
        if draft.now - worker.since >= draft.timings.gang_bind:
            draft = order_away(
                draft, worker, WorkerReason.RESCHEDULED_AFTER_NODE_RECOVERY, messages.capacity.avoided_nodes_healthy()
            )
        else:
            draft = draft.requeue_at(worker.since + draft.timings.gang_bind)
    return draft


def apply(draft: PlanDraft) -> PlanDraft:
    """Create the missing pods, and remove their scheduling gates when they may start."""
    missing = [] if _keeps_out(draft) else _missing(draft)
    waits = rendezvous.waits(draft) if missing else None
    if waits is not None:
        return waits
    draft = _create(draft, missing)
    gated = _gated(draft)
    if not gated:
        return draft
    if draft.status.gang.lifted_at is None:
        return _wait_or_lift(draft, gated)
    if all(worker.node for worker in gated):
        return _bound(draft, gated)
    return _lift(draft, gated)


def _create(draft: PlanDraft, missing: list[Worker]) -> PlanDraft:
    for worker in missing:
        name = pod_name(draft.seen.job.name, worker.incarnation)
        if draft.seen.pod_named(name) is None:
            manifest = pod_manifest(draft.seen.job, draft.spec, worker, draft.seen.platform, draft.seen.rendezvous_ip)
            draft = draft.with_action(CreatePod(name=name, manifest=manifest)).requeue_soon()
    return draft


def _missing(draft: PlanDraft) -> list[Worker]:
    return [worker for worker in draft.status.in_phase(Phase.WANTED) if not worker.known]


def _gated(draft: PlanDraft) -> list[Worker]:
    return [worker for worker in draft.status.in_phase(Phase.WANTED) if worker.gated]


def _wait_or_lift(draft: PlanDraft, gated: list[Worker]) -> PlanDraft:
    draft = draft.requeue_soon()
    held = _held(draft, gated)
    draft = _queued(draft, bool(held))
    if not all(worker.known for worker in gated) and not _keeps_out(draft):
        return draft.waiting_for(WaitReason.WAITING_FOR_PODS, messages.capacity.waiting_for_pods())
    retry_at = draft.status.gang.retry_at
    if retry_at is not None and draft.now < retry_at:
        return draft.requeue_at(retry_at).waiting_for(
            WaitReason.WAITING_FOR_GANG, messages.capacity.waiting_for_retry()
        )
    line = draft.seen.line
    if line is None:  # from before this job was known
        draft = draft.requeue_in(c.POLL_OPEN)
        return draft.waiting_for(WaitReason.WAITING_FOR_PODS, messages.capacity.waiting_for_pods())
    if held and not _enough(draft, len(gated) - len(held))[1]:
        return draft.waiting_for(WaitReason.WAITING_FOR_QUEUE, _not_admitted(draft, gated, held))
    places = _places(draft, line, [worker for worker in gated if worker not in held])
    placed = len(places.workers)
    if placed < len(gated):
        draft, size = _enough(draft, placed)
        if size:
            return _start_with(draft, gated, places, size)
        return draft.waiting_for(WaitReason.WAITING_FOR_CAPACITY, _lacking(draft, gated, places))
    gang = replace(draft.status.gang, lifted_at=draft.now, unpromised_since=draft.now)
    return _lift(*_settled(draft.with_status(gang=gang), gated, places))


def _not_admitted(draft: PlanDraft, gated: list[Worker], held: list[Worker]) -> str:
    hint = len(held) == len(gated) and bool(draft.spec.scheduling.queue)
    return messages.capacity.not_admitted(len(gated) - len(held), len(gated), _queue(draft, held), hint=hint)


def _queued(draft: PlanDraft, queued: bool) -> PlanDraft:
    """Record whether a queue holds the gang: other jobs then reserve no capacity for it."""
    gang = draft.status.gang
    return draft if gang.queued == queued else draft.with_status(gang=replace(gang, queued=queued))


def _keeps_out(draft: PlanDraft) -> bool:
    """Return whether a queue could admit pods before the next try is due. Then none are created until that time."""
    retry_at = draft.status.gang.retry_at
    waits = draft.status.gang.lifted_at is None and retry_at is not None and draft.now < retry_at
    return waits and bool(draft.spec.scheduling.queue)


def _lacking(draft: PlanDraft, gated: list[Worker], places: _Placement) -> str:
    on_demand = sum(worker.on_demand for worker in gated)
    lacking = sum(worker.on_demand for worker in places.workers) < on_demand
    return messages.capacity.waiting_for_capacity(
        len(places.workers),
        len(gated),
        domain=draft.spec.scheduling.packed_by,
        on_demand=on_demand if lacking else 0,
        others=places.of_others,
    )


def _settled(draft: PlanDraft, gated: list[Worker], places: _Placement) -> tuple[PlanDraft, list[Worker]]:
    """Record the topology domain of a packed job before its gates are removed."""
    if places.domain:
        gated = [replace(worker, domain=places.domain) for worker in gated]
        for worker in gated:
            draft = draft.with_worker(worker)
    return draft, gated


def _enough(draft: PlanDraft, placed: int) -> tuple[PlanDraft, int]:
    """Return with how many workers an elastic job starts after it has waited long enough; 0: it waits."""
    spec, since = draft.spec, draft.status.gang.since or draft.now
    size = placed - placed % spec.replica_step
    if not spec.shrinkable or size < max(spec.min_replicas, 1):
        return draft, 0
    due = since + max(timedelta(seconds=spec.shrink_after_seconds), c.FIRST_GANG_WAIT)
    return (draft.requeue_at(due), 0) if draft.now < due else (draft, size)


def _start_with(draft: PlanDraft, gated: list[Worker], places: _Placement, size: int) -> PlanDraft:
    """Start with these workers. The others are recreated later, and join when there is capacity."""
    message = messages.capacity.started_with_fewer(size, len(gated))
    begin = sorted(places.workers, key=lambda worker: (not worker.on_demand, worker.incarnation))[:size]
    for worker in gated:
        if worker not in begin:
            draft = order_away(draft, worker, WorkerReason.INSUFFICIENT_CAPACITY, message)
    gang = replace(draft.status.gang, lifted_at=draft.now, unpromised_since=draft.now, size=size)
    return _lift(
        *_settled(
            draft.with_status(gang=gang).with_event(WorkerReason.STARTED_WITH_FEWER_WORKERS, message), begin, places
        )
    )


@dataclass(frozen=True, kw_only=True)
class _Placement:
    workers: tuple[Worker, ...]
    domain: str
    of_others: int


def _places(draft: PlanDraft, line: GangQueue, gated: list[Worker]) -> _Placement:
    """Return which workers of the gang fit after running pods and earlier gangs, where, and how many those gangs
    hold.

    Preemption is considered only if not all of them fit otherwise.
    """
    standing = standing_of(_pods(draft, gated)) or GangPriority()
    rooms, others = line.before(standing, draft.seen.job.created, draft.seen.job.key)
    best = _Placement(workers=(), domain="", of_others=others)
    for room in rooms:
        room.vacate({worker.node for worker in gated if worker.node})
        found, domain = place(draft.seen.job, draft.seen.platform, room, gated)
        if len(found) > len(best.workers):
            best = _Placement(workers=found, domain=domain, of_others=others)
        if len(found) == len(gated):
            break
    return best


def _pods(draft: PlanDraft, workers: list[Worker]) -> list[PodView]:
    return [pod for worker in workers if (pod := draft.pod(worker)) is not None and not pod.absent]


def _lift(draft: PlanDraft, gated: list[Worker]) -> PlanDraft:
    for worker in gated:
        pod = draft.pod(worker)
        if pod is not None and pod.gated and not pod.absent:
            labels = ((draft.spec.scheduling.packed_by, worker.domain),) if worker.domain else ()
            draft = draft.with_action(LiftGate(name=pod.name, uid=pod.uid, node_labels=labels))
    draft = draft.requeue_in(timedelta(seconds=2))
    waiting = [worker for worker in gated if not worker.node]
    if not waiting:
        return draft
    coming = sum(_nominated(draft, worker) for worker in waiting)
    return draft.waiting_for(WaitReason.SCHEDULING, messages.capacity.scheduling(len(waiting), len(gated), coming))


def _bound(draft: PlanDraft, gated: list[Worker]) -> PlanDraft:
    for worker in gated:
        draft = draft.changed_worker(worker, gated=False)
    return draft.with_status(gang=GangAttempt())
