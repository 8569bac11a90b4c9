"""A worker's pod, from the API's JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

from holdfast_operator.api import names as c
from holdfast_operator.api.json import EMPTY, Json, items, loads, part
from holdfast_operator.api.reasons import Cause, FailureReason, cause_of
from holdfast_operator.api.redaction import hide_secrets
from holdfast_operator.api.spec.pod_template import trainer_container
from holdfast_operator.api.times import parse_time
from holdfast_operator.views import values

Conditions = tuple[tuple[str, str, str], ...]  # (type, status, reason)


@dataclass(frozen=True, kw_only=True)
class Exit:
    """The end of a trainer container, or of the launcher in it."""

    code: int
    reason: str = ""
    cause: Cause | None = None
    message: str = ""
    traceback: tuple[str, ...] = ()
    final: bool = False

    @property
    def unseen(self) -> bool:
        """Whether the node was down at the end, so that containerd's code means nothing."""
        return self.code == c.EXIT_UNSEEN and self.reason == "Unknown"

    def words(self) -> str:
        """Return the message with the traceback's last lines."""
        return "\n".join(part for part in (self.message, *self.traceback) if part)


@dataclass(frozen=True, kw_only=True, slots=True)
class PodView:
    """A worker's pod."""

    name: str
    uid: str
    incarnation: int
    created: datetime | None = None
    deleted_at: datetime | None = None
    absent: bool = False  # the object is gone; this is its last known state
    phase: str = "Pending"
    node: str = ""
    ip: str = ""
    gated: bool = False
    held_by: tuple[str, ...] = ()  # scheduling gates of others, such as a queue's
    unschedulable: str = ""  # the scheduler's message
    disruption: str = ""  # reason of the condition DisruptionTarget
    disruption_note: str = ""  # its message
    waiting: tuple[tuple[str, str, str], ...] = ()  # (container, reason, message)
    exit: Exit | None = None  # of the trainer container
    running_since: datetime | None = None  # of the trainer container; None if it does not run
    containers_ended: bool = False
    failure_reason: str = ""  # of the pod itself, for example if a kubelet rejects or evicts it
    failure: str = ""  # the same, with its message
    unprepared: str = ""  # the failed init container and its failure; nothing else in the pod ever ran
    grace_seconds: int = 30
    index_label: str = ""
    warnings: tuple[tuple[str, str], ...] = ()  # (reason, note) of its warning events
    conditions: Conditions = ()
    pulling: str = ""  # the kubelet's message that it pulls an image, if that was the last event
    priority: int = 0
    preempts: bool = True
    relabelled: bool = False  # a label by which it is listed, or its owner, was removed or changed
    nominated: bool = False  # the scheduler preempts other pods for it

    @property
    def alive(self) -> bool:
        """Whether the pod exists, has not ended and is not being deleted."""
        return not (self.absent or self.terminal or self.leaving)

    @property
    def bound(self) -> bool:
        """Whether the pod has a node."""
        return bool(self.node)

    @property
    def exit_code(self) -> int | None:
        """The exit code of the trainer; None if it runs, or if its exit code is not known."""
        return self.exit.code if self.exit is not None and not self.exit.unseen else None

    @property
    def terminal(self) -> bool:
        """Whether the kubelet reported that the launcher's container ended, or the pod never had a node.

        Sidecars may continue for a while; they do not train.
        """
        if self.exit is not None:
            return True
        return self.phase in ("Failed", "Succeeded") and (self.containers_ended or not self.node)

    @property
    def outlasted(self) -> bool:
        """Whether another container keeps the pod, and its GPUs, after the trainer has ended."""
        return self.exit is not None and self.phase == "Running" and not (self.absent or self.deleted_at)

    @property
    def over_limit(self) -> bool:
        """Whether the kubelet evicted it for its own limit, such as a volume's. Other evictions are disruptions."""
        return self.failure_reason == FailureReason.EVICTED and not self.disruption

    @property
    def leaving(self) -> bool:
        """Whether another client requested its deletion or announced its disruption."""
        return self.deleted_at is not None or bool(self.disruption)


def parse_pod(body: Json, *, absent: bool = False) -> PodView:
    """Parse one of the operator's pods from the API's JSON."""
    meta, spec, status = part(body, "metadata"), part(body, "spec"), part(body, "status")
    labels = meta.get("labels") or EMPTY
    conditions = {str(item.get("type")): item for item in status.get("conditions") or ()}
    target = conditions.get("DisruptionTarget", EMPTY)
    trainer = trainer_container(spec) if spec.get("containers") else ""
    statuses = list(status.get("containerStatuses") or ())
    own = next((item for item in statuses if item.get("name") == trainer), EMPTY)
    gates = [str(gate.get("name")) for gate in spec.get("schedulingGates") or ()]
    return PodView(
        name=str(meta.get("name", "")),
        uid=str(meta.get("uid", "")),
        incarnation=values.number(labels.get(c.LABEL_INCARNATION)),
        created=parse_time(meta.get("creationTimestamp")),
        deleted_at=parse_time(meta.get("deletionTimestamp")),
        absent=absent,
        phase=str(status.get("phase", "Pending")),
        node=str(spec.get("nodeName") or ""),
        ip=str(status.get("podIP") or ""),
        gated=c.GANG_GATE in gates,
        held_by=tuple(gate for gate in gates if gate != c.GANG_GATE),
        unschedulable=_unschedulable(conditions.get("PodScheduled", EMPTY)),
        disruption=_true_reason(target),
        disruption_note=str(target.get("message") or "").strip(),
        waiting=_waiting([*(status.get("initContainerStatuses") or ()), *statuses]),
        exit=_exit(part(part(own, "state"), "terminated")),
        running_since=parse_time(part(part(own, "state"), "running").get("startedAt")),
        conditions=_same(
            tuple((key, str(item.get("status")), str(item.get("reason"))) for key, item in conditions.items())
        ),
        containers_ended=_containers_ended(status, conditions),
        failure_reason=str(status.get("reason") or ""),
        failure=": ".join(str(status[key]) for key in ("reason", "message") if status.get(key)),
        unprepared=_unprepared(spec, status),
        grace_seconds=int(spec.get("terminationGracePeriodSeconds") or 30),
        index_label=str(labels.get(c.LABEL_INDEX, "")),
        priority=priority_of(spec),
        preempts=spec.get("preemptionPolicy") != c.NEVER_PREEMPTS,
        relabelled=_relabelled(meta, labels),
        nominated=bool(status.get("nominatedNodeName")),
    )


def _relabelled(meta: Json, labels: Json) -> bool:
    owners = [owner.get("name") for owner in meta.get("ownerReferences") or () if owner.get("kind") == c.KIND]
    ours = {c.LABEL_APP_MANAGED_BY: c.MANAGED_BY, c.LABEL_APP_COMPONENT: c.COMPONENT_WORKER}
    listed = all(labels.get(key) == value for key, value in ours.items())
    return not listed or labels.get(c.LABEL_JOB) not in owners


def priority_of(pod_spec: Json) -> int:
    """Return the priority that admission wrote into a pod; without one, the scheduler uses 0."""
    return int(pod_spec.get("priority") or 0)


@lru_cache(maxsize=1024)
def _same(conditions: Conditions) -> Conditions:
    """Return the equal object from the cache: ten thousand pods have only a few different values."""
    return conditions


def _containers_ended(status: Json, conditions: Mapping[str, Json]) -> bool:
    """Return whether no container runs: all ended, or the kubelet rejected the pod or an init container failed.

    If the garbage collector wrote the phase, the node is away, and containers that it did not report may still run.
    """
    states = [part(item, "state") for item in status.get("containerStatuses") or ()]
    if states and all(state.get("terminated") for state in states):
        return True
    collected = _true_reason(conditions.get("DisruptionTarget", EMPTY)) == "DeletionByPodGC"
    over = status.get("phase") in ("Failed", "Succeeded") and not collected
    return over and all(state.get("terminated") or state.get("waiting") for state in states)


def _unprepared(spec: Json, status: Json) -> str:
    """Return the failure of an init container. Sidecars are init containers too, and may exit with any code."""
    made = spec.get("initContainers") or ()
    sidecars = {item.get("name") for item in made if item.get("restartPolicy") == "Always"}
    for item in status.get("initContainerStatuses") or ():
        ended = part(part(item, "state"), "terminated")
        if ended.get("exitCode") and item.get("name") not in sidecars:
            said = str(ended.get("message") or ended.get("reason") or "")
            told = f": {hide_secrets(said)}" if said else ""
            return f"its init container {item.get('name')} ended with exit code {ended['exitCode']}{told}"
    return ""


def _unschedulable(condition: Json) -> str:
    failed = condition.get("status") == "False" and condition.get("reason") == "Unschedulable"
    return str(condition.get("message") or "") if failed else ""


def _true_reason(condition: Json) -> str:
    return str(condition.get("reason") or "Unknown") if condition.get("status") == "True" else ""


def _waiting(statuses: Iterable[Json]) -> tuple[tuple[str, str, str], ...]:
    found = []
    for status in statuses:
        waiting = part(part(status, "state"), "waiting")
        if waiting.get("reason"):
            words = hide_secrets(str(waiting.get("message") or ""))
            found.append((str(status.get("name", "")), str(waiting["reason"]), words))
    return tuple(found)


def _exit(terminated: Json) -> Exit | None:
    """Return the end of the container, with the launcher's entry from the termination log if there is one."""
    if not terminated:
        return None
    code, reason = int(terminated.get("exitCode") or 0), str(terminated.get("reason") or "")
    left = _termination_log(str(terminated.get("message") or ""))
    if left is None:
        return Exit(code=code, reason=reason, message=hide_secrets(str(terminated.get("message") or "")))
    return Exit(
        code=code,
        reason=reason if reason == FailureReason.OOM_KILLED else str(left.get("reason") or reason),
        cause=cause_of(left.get("cause")),
        message=hide_secrets(str(left.get("message") or "")),
        traceback=tuple(hide_secrets(str(line)) for line in items(left.get("traceback"))),
        final=bool(left.get("final")),
    )


def _termination_log(message: str) -> Json | None:
    try:
        left = loads(message.encode(errors="replace"))
    except ValueError:
        return None
    known = isinstance(left, dict) and left.get("version") == c.PROTOCOL_VERSION
    return left if known else None
