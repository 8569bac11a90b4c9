"""Workers beyond ``workers.replicas``, up to ``elasticity.maxReplicas``, while no other job needs the capacity.

They are requested by ``replicaStep`` at a time when all workers train and the last growth is ``growCooldownSeconds``
ago. A lost one is not replaced at once, and a waiting gang of another job gets their capacity. The workers of
``workers.replicas`` are not affected.

Invariants, while the job is not suspended: replicas ≤ target ≤ maxReplicas, and the workers beyond replicas are whole
steps.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from holdfast_operator.api.reasons import WorkerReason
from holdfast_operator.api.status import ConditionType, Phase, Worker
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.reporting import messages
from holdfast_operator.decision.reporting.progress import newest_report
from holdfast_operator.decision.workers.replicas import planned
from holdfast_operator.scheduling.capacity import FreeCapacity
from holdfast_operator.scheduling.fit import place
from holdfast_operator.scheduling.gang_queue import waiting


def apply(draft: PlanDraft) -> PlanDraft:
    """Decide the number of workers beyond ``replicas``."""
    most = draft.spec.max_replicas - draft.spec.replicas
    if draft.spec.suspend or most <= 0:
        return draft.with_status(extra=0)
    draft = _unplaced(draft)
    there = _ranked(draft) - draft.spec.replicas
    draft = draft.with_status(extra=_in_steps(draft, max(0, min(draft.status.extra, most, there))))
    if _wanted_elsewhere(draft):
        return _given_back(draft)
    if draft.status.extra + draft.spec.replica_step > most or not _all_is_well(draft):
        return draft
    due = _due(draft)
    if due is None or draft.now < due:
        return draft if due is None else draft.requeue_at(due)
    return _grown(draft) if _room(draft) else draft.requeue_in(draft.timings.growth_poll)


def _in_steps(draft: PlanDraft, extra: int) -> int:
    """Return whole steps only. Workers of an incomplete step would stay on standby forever."""
    return extra - extra % draft.spec.replica_step


def _ranked(draft: PlanDraft) -> int:
    """Return the workers that have or get a rank. A spare does not count as a worker lost from a growth."""
    wanted = draft.status.in_phase(Phase.WANTED)
    members = frozenset(draft.status.membership.member_uids())
    idle = sum(worker.pod_uid not in members for worker in wanted)
    return len(wanted) - min(draft.spec.spares, idle)


def _unplaced(draft: PlanDraft) -> PlanDraft:
    """Give up workers that found no node in time, and do not request them again at once."""
    if not draft.status.extra:
        return draft
    extra = draft.status.extra
    for worker in _youngest(draft, extra):
        if worker.node or worker.since is None:
            continue
        if draft.now - worker.since < draft.timings.gang_bind:
            draft = draft.requeue_at(worker.since + draft.timings.gang_bind)
        else:
            extra -= 1
    return draft if extra == draft.status.extra else draft.with_status(extra=extra, grown_at=draft.now)


def _youngest(draft: PlanDraft, count: int) -> list[Worker]:
    wanted = (worker for worker in draft.status.in_phase(Phase.WANTED) if not worker.spare)
    return sorted(wanted, key=lambda worker: worker.incarnation)[-count:]


def _wanted_elsewhere(draft: PlanDraft) -> bool:
    """Return whether a gang of another job has waited for longer than a normal start, and fits into the cluster.

    A gang that not even an empty cluster could hold is ignored.
    """
    line = draft.seen.line
    if line is None:
        return False
    bind = draft.timings.gang_bind
    others = (rival for rival in waiting(line, but=draft.seen.job.key) if draft.now - rival.since > bind)
    return any(map(line.could_begin, others))


def _given_back(draft: PlanDraft) -> PlanDraft:
    if not draft.status.extra:
        return draft
    message = messages.capacity.capacity_yielded(draft.status.extra)
    return draft.with_status(extra=0, grown_at=draft.now).with_event(WorkerReason.YIELDED_CAPACITY, message)


def _all_is_well(draft: PlanDraft) -> bool:
    """Return whether all workers train in one world and no recovery is in progress."""
    best = newest_report(draft)
    needed = draft.needed
    unsettled = draft.status.in_phase(Phase.LEAVING, Phase.LOST)
    open_incident = any(incident.resumed is None for incident in draft.status.incidents)
    if best is None or best.world is None or unsettled or open_incident or draft.status.trouble is not None:
        return False
    trains = {worker.pod_uid for worker in needed} == set(best.world.members)
    return trains and draft.status.holds(ConditionType.READY)


def _due(draft: PlanDraft) -> datetime | None:
    ready = draft.status.condition(ConditionType.READY)
    if ready is None:
        return None
    # A recovery may end before Ready becomes false.
    troubles = (incident.resumed for incident in draft.status.incidents if incident.resumed is not None)
    since = max(ready.since, draft.status.grown_at or ready.since, *troubles)
    return since + timedelta(seconds=draft.spec.grow_cooldown_seconds)


def _room(draft: PlanDraft) -> bool:
    room = FreeCapacity(draft.seen.nodes, draft.seen.usage, draft.now)
    wanted = planned(draft, draft.spec.replica_step)
    found, _ = place(draft.seen.job, draft.seen.platform, room, wanted, draft.avoided())
    return len(found) == draft.spec.replica_step


def _grown(draft: PlanDraft) -> PlanDraft:
    extra = draft.status.extra + draft.spec.replica_step
    message = messages.capacity.scaling_up(draft.spec.replicas + extra, draft.spec.max_replicas)
    return draft.with_status(extra=extra, grown_at=draft.now).with_event(WorkerReason.SCALING_UP, message)
