"""A job that waits for capacity, as other jobs see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from holdfast_operator.api import names as c
from holdfast_operator.api.job import key_of
from holdfast_operator.api.json import Json, objects, part
from holdfast_operator.api.reasons import JobReason, StartupReason
from holdfast_operator.api.spec.pod_template import check
from holdfast_operator.api.spec.scheduling import Scheduling, parse_scheduling
from holdfast_operator.api.status import ConditionType, Phase
from holdfast_operator.api.status.operator_state import decode
from holdfast_operator.api.times import parse_time
from holdfast_operator.errors import UnreadableError


@dataclass(frozen=True, kw_only=True)
class GangPriority:
    """The scheduling priority and preemption policy of a gang's pods."""

    priority: int = 0
    preempts: bool = True


@dataclass(frozen=True, kw_only=True)
class WaitingGang:
    """A job whose gang waits, or whose lifted pods have no node yet."""

    key: str
    uid: str
    created: datetime
    since: datetime  # when its gang began to wait
    lifted: bool
    pods: int
    pod_spec: Json = field(hash=False)
    least: int = 0  # the number of workers with which it may start; 0: all
    retry_at: datetime | None = None
    scheduling: Scheduling = field(default_factory=Scheduling)
    on_demand: int = 0  # number of its pods that must stay off spot capacity
    domain: str = ""
    standing: GangPriority = field(default_factory=GangPriority)


def rival_of(body: Json) -> WaitingGang | None:
    """Return a job's gang if it has no place yet and may get one. Reads few fields, as this runs over all jobs."""
    status = part(body, "status")
    ended = any(
        condition.get("status") == "True"
        and (
            condition.get("type") in (ConditionType.COMPLETE, ConditionType.FAILED)
            or condition.get("reason") == JobReason.INVALID_SPEC
        )
        for condition in objects(status.get("conditions"))
    )
    workers = part(part(body, "spec"), "workers")
    out = ended or (body.get("spec") or {}).get("suspend") or body["metadata"].get("deletionTimestamp")
    if out or not isinstance(workers.get("replicas"), int):
        return None
    state = decode(status)
    listed = objects(state.get("workers"))
    gated = [worker for worker in listed if worker.get("gated") and worker.get("phase", Phase.WANTED) == Phase.WANTED]
    waiting = sum(1 for worker in gated if not worker.get("node")) if listed else workers["replicas"]
    created = parse_time(body["metadata"].get("creationTimestamp"))
    pod_spec = part(part(workers, "template"), "spec")
    if not waiting or created is None or not _readable(pod_spec):
        return None
    gang = part(state, "gang")
    if not gang.get("liftedTime") and _cannot_lift(state):
        return None
    try:
        scheduling = parse_scheduling(body["spec"])
    except UnreadableError:
        return None
    if not scheduling.gang:
        return None  # the scheduler places its pods one by one, so no capacity is reserved for them
    if scheduling.queue and not gang.get("liftedTime") and (gang.get("queued") or not listed):
        return None  # its quota may never be available, regardless of capacity
    unplaced = [worker for worker in gated if not worker.get("node")]
    return WaitingGang(
        key=key_of(body),
        uid=str(body["metadata"].get("uid", "")),
        created=created,
        since=parse_time(gang.get("waitStartTime")) or created,
        lifted=bool(gang.get("liftedTime")),
        pods=waiting,
        pod_spec=pod_spec,
        least=_least(body["spec"], waiting),
        retry_at=parse_time(gang.get("nextAttemptTime")),
        scheduling=scheduling,
        on_demand=sum(bool(w.get("onDemand")) for w in unplaced) if listed else min(scheduling.on_demand, waiting),
        domain=next((str(worker["domain"]) for worker in unplaced if worker.get("domain")), ""),
    )


def _least(spec: Json, waiting: int) -> int:
    """Return the smallest number of its pods with which the gang may start if not all fit."""
    elasticity = part(spec, "elasticity")
    fewest = elasticity.get("minReplicas")
    shrinks = elasticity.get("onFailure", c.SHRINK) == c.SHRINK
    return min(max(fewest, 1), waiting) if shrinks and isinstance(fewest, int) else waiting


def _cannot_lift(state: Json) -> bool:
    """Return whether its pods cannot be created, for example because of a quota, which may never change.

    Unschedulable remains from an earlier try, so a gang with this reason keeps its turn.
    """
    trouble = part(state, "trouble")
    return bool(trouble) and trouble.get("reason") != StartupReason.UNSCHEDULABLE


def _readable(pod_spec: Json) -> bool:
    """Return whether another job's template can be read. That job's own pass may not have validated it yet."""
    try:
        check(pod_spec, "")
    except UnreadableError:
        return False
    return bool(pod_spec)
