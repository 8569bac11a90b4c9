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
    """What the scheduler thinks of a gang's pods."""

    priority: int = 0
    preempts: bool = True


@dataclass(frozen=True, kw_only=True)
class WaitingGang:
    """A job whose gang waits, or whose lifted pods have no node yet."""

    key: str
    uid: str
    created: datetime
    since: datetime  # its gang waits
    lifted: bool
    pods: int
    pod_spec: Json = field(hash=False)
    least: int = 0  # with so many of them it may begin; 0: with all
    retry_at: datetime | None = None
    scheduling: Scheduling = field(default_factory=Scheduling)
    on_demand: int = 0  # of the pods
    domain: str = ""
    standing: GangPriority = field(default_factory=GangPriority)


def rival_of(body: Json) -> WaitingGang | None:
    """A job whose gang has no place yet and may get one. Read sparsely: this runs over all jobs."""
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
        return None  # its pods take what the scheduler finds, so there is no turn to keep for them
    if scheduling.queue and not gang.get("liftedTime") and (gang.get("queued") or not listed):
        return None  # it may have to wait for its quota for ever, whatever room there is
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
    """With how many of its pods the gang may begin where there is not room for all."""
    elasticity = part(spec, "elasticity")
    fewest = elasticity.get("minReplicas")
    shrinks = elasticity.get("onFailure", c.SHRINK) == c.SHRINK
    return min(max(fewest, 1), waiting) if shrinks and isinstance(fewest, int) else waiting


def _cannot_lift(state: Json) -> bool:
    """What keeps its pods from being made, such as a quota, can last for ever: nobody is to wait for that.

    Unschedulable is what is left of an earlier try; whoever finds no room now keeps its turn.
    """
    trouble = part(state, "trouble")
    return bool(trouble) and trouble.get("reason") != StartupReason.UNSCHEDULABLE


def _readable(pod_spec: Json) -> bool:
    """Another job's template is weighed in this pass, maybe before that job's own pass could judge it."""
    try:
        check(pod_spec, "")
    except UnreadableError:
        return False
    return bool(pod_spec)
