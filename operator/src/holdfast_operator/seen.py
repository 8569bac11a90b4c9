"""What one pass sees: a frozen snapshot, parsed once from the API's and the agents' JSON.

Nothing here reads a cluster or a clock; ``observe.py`` does, and fills ``Observed``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property, lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from holdfast_operator import constants as c
from holdfast_operator.api import Job, Json, Pair, Scheduling, parse_pair, parse_time, trainer_container
from holdfast_operator.quantities import Amounts, quantity
from holdfast_operator.reading import loads
from holdfast_operator.redaction import hide_secrets
from holdfast_operator.remediation.marks import Mark, mark_of
from holdfast_operator.status import Checkpoint, Status
from holdfast_operator.status.goodput import Spent, short

if TYPE_CHECKING:
    from holdfast_operator.line import Line

Conditions = tuple[tuple[str, str, str], ...]  # (type, status, reason)

_EMPTY: Mapping[str, Any] = {}
# So many entries of each list of a report are heard.
_HEARD = {
    "incidents": c.MAX_INCIDENTS_TOLD,
    "foreignClaims": c.MAX_CLAIMS_TOLD,
    "notices": c.MAX_NOTICES_TOLD,
    "quarantined": c.QUARANTINED_KEPT,
    "lostMembers": c.MAX_WORKERS,
    "gpu": c.MAX_GPU_ERRORS,
}


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a trainer container, or the launcher in it, ended."""

    code: int
    reason: str = ""
    cause: str = ""
    message: str = ""
    traceback: tuple[str, ...] = ()
    final: bool = False

    def words(self) -> str:
        """The message with the traceback's last lines."""
        return "\n".join(part for part in (self.message, *self.traceback) if part)


@dataclass(frozen=True, kw_only=True, slots=True)
class PodView:
    """A worker's pod."""

    name: str
    uid: str
    incarnation: int
    created: datetime | None = None
    deleted_at: datetime | None = None
    absent: bool = False  # the object is gone; this is what was last seen of it
    phase: str = "Pending"
    node: str = ""
    ip: str = ""
    gated: bool = False
    held_by: tuple[str, ...] = ()  # gates of others, such as a queue's
    unschedulable: str = ""  # the scheduler's message
    disruption: str = ""  # reason of the condition DisruptionTarget
    waiting: tuple[tuple[str, str, str], ...] = ()  # (container, reason, message)
    exit: Exit | None = None  # the trainer container's
    running_since: datetime | None = None  # the same; None if it does not run
    containers_ended: bool = False
    failure: str = ""  # reason and message of the pod itself, as where a kubelet rejects it
    grace_seconds: int = 30
    index_label: str = ""
    warnings: tuple[tuple[str, str], ...] = ()  # (reason, note) of its warning events
    conditions: Conditions = ()
    pulling: str = ""  # the kubelet's word that it pulls an image, if that was its last
    priority: int = 0
    preempts: bool = True
    nominated: bool = False  # the scheduler makes room for it: those that have it were told to go

    @property
    def bound(self) -> bool:
        """Whether it has a node."""
        return bool(self.node)

    @property
    def terminal(self) -> bool:
        """The kubelet reported that the launcher's container ended, or the pod never had a node to run on.

        Sidecars may go on for a while; they train nothing.
        """
        if self.exit is not None:
            return True
        return self.phase in ("Failed", "Succeeded") and (self.containers_ended or not self.node)

    @property
    def leaving(self) -> bool:
        """Somebody asked for its deletion or announced its disruption."""
        return self.deleted_at is not None or bool(self.disruption)


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """A node, as far as workers depend on it."""

    name: str
    ready: bool = True
    unschedulable: bool = False
    taints: tuple[tuple[str, str, str], ...] = ()  # (key, value, effect)
    boot_id: str = ""
    mark: Mark | None = None  # remediation's
    labels: Json = field(default_factory=dict, hash=False)
    allocatable: Json = field(default_factory=dict, hash=False)
    lease_renewed: datetime | None = None
    lease_seconds: int = 40

    @cached_property
    def offers(self) -> Amounts:
        """What it has for pods."""
        return {key: quantity(value) for key, value in self.allocatable.items()}

    def lease_stale(self, now: datetime) -> bool:
        """Its kubelet has been silent for longer than its lease."""
        return self.lease_renewed is not None and now - self.lease_renewed > timedelta(seconds=self.lease_seconds)

    def dead(self, now: datetime) -> bool:
        """Not heard of: silent, which proves nothing about its processes."""
        return not self.ready or self.lease_stale(now) or self.out_of_service

    @property
    def out_of_service(self) -> bool:
        """An administrator vouches that it is off."""
        return any(key == c.TAINT_OUT_OF_SERVICE for key, _, _ in self.taints)

    @property
    def tainted_silent(self) -> bool:
        """The node controller has not heard of it, or had not a moment ago."""
        return any(key in (c.TAINT_NOT_READY, c.TAINT_UNREACHABLE) for key, _, _ in self.taints)

    @property
    def announced(self) -> str:
        """The taint that says it will go, or empty."""
        return next((key for key, _, _ in self.taints if key in c.TAINTS_LEAVING), "")


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A cloud's announcement, as a sidecar saw it."""

    id: str
    reason: str
    source: str
    action: str

    @property
    def leaves(self) -> bool:
        """Whether the node will be taken; a mere recommendation is not."""
        return self.action in c.NOTICE_ACTIONS_LEAVING

    @property
    def advises(self) -> bool:
        """Whether the node may be taken soon, so that nothing new should come to it."""
        return not self.leaves and self.action not in c.NOTICE_ACTIONS_PASSING


@dataclass(frozen=True, kw_only=True)
class World:
    """A running world, as a launcher tells."""

    pair: Pair
    publication: str
    members: tuple[str, ...]
    coordinator: str


@dataclass(frozen=True, kw_only=True)
class Restored:
    """From where a world goes on, as a launcher tells once it has made a step."""

    step: int
    origin: str | None


@dataclass(frozen=True, kw_only=True)
class Told:
    """An incident in a launcher's words."""

    pair: Pair
    cause: str
    action: str
    reason: str
    message: str
    pod: str | None
    rank: int | None
    exit_code: int | None
    node: str | None
    detected: datetime | None
    resumed: datetime | None
    lost_steps: int | None
    restored_from: str | None = None
    part_of: Pair | None = None  # of the incident that it is counted with


@dataclass(frozen=True, kw_only=True)
class Quarantined:
    """A checkpoint that was damaged and set aside."""

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class GpuError:
    """What went wrong with one of the worker's GPUs, as its sidecar read it from the node's exporter.

    There is one for each GPU, kind and XID; what comes again raises ``count`` and ``time``.
    """

    gpu: str  # UUID
    kind: str  # Xid, DoubleBitEcc, … (docs/reference/sidecar.md)
    xid: int | None = None
    count: int = 1
    cause: str = ""  # the sidecar's word: a cause of ours, or empty
    action: str = ""  # what the sidecar's table advises: Ignore, InPlace, RecreatePod, ReplaceNode
    message: str = ""
    since: datetime | None = None  # when it was first seen; by the node's clock
    time: datetime | None = None  # when it was last seen


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check of a worker's preflight."""

    name: str
    result: str
    message: str
    unreached: tuple[str, ...] = ()  # UIDs of the pods that Network does not reach
    of_the_job: bool = False  # failed by what the job says, whatever the node


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What a worker's sidecar found of its node before the worker may join."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """None runs or has failed."""
        return all(check.result in ("Passed", "Skipped") for check in self.checks)

    @property
    def failed(self) -> tuple[Check, ...]:
        """Those that have."""
        return tuple(check for check in self.checks if check.result == "Failed")

    def result(self, name: str) -> str:
        """Of one check; empty if it is none of these."""
        return next((check.result for check in self.checks if check.name == name), "")


@dataclass(frozen=True, kw_only=True)
class Report:
    """The newest report of one pod."""

    pod_uid: str
    received_at: datetime
    has_launcher: bool = False
    silent_seconds: float | None = None
    ready: bool = False
    store: int = c.PORT_STORE
    control: int = c.PORT_CONTROL
    accepted: Pair | None = None
    started: Pair | None = None
    world: World | None = None
    restored: Restored | None = None
    phase: str = ""
    message: str = ""
    committed_step: int | None = None
    committed_at: datetime | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    highest_claim: Json | None = field(default=None, hash=False)
    foreign_claims: tuple[Json, ...] = field(default=(), hash=False)
    quarantined: tuple[Quarantined, ...] = ()
    loss: float | None = None
    throughput: float | None = None
    incidents: tuple[Told, ...] = ()
    notices: tuple[Notice, ...] = ()
    gpu_errors: tuple[GpuError, ...] = ()
    preflight: Preflight | None = None  # None: nothing was asked of it
    lost_members: tuple[str, ...] = ()
    conflict: int = 0
    checkpointing: bool = False  # a rank of it is in a checkpoint
    exit: Exit | None = None
    books: Spent = ()  # what its ranks' seconds went into, since the launcher's start
    unheard: int = 0  # entries of its lists beyond those that are heard

    def fresh(self, now: datetime) -> bool:
        """Young enough to speak about now."""
        return now - self.received_at <= c.REPORT_FRESH

    @property
    def highest_pair(self) -> Pair | None:
        """The highest world that it knows to have started."""
        pairs = [pair for pair in (self.started, self.world.pair if self.world else None) if pair]
        return max(pairs, default=None)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The API server's answer to the last creation of a child."""

    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What the scheduler thinks of a gang's pods."""

    priority: int = 0
    preempts: bool = True


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A job whose gang waits, or whose lifted pods have no node yet."""

    key: str
    uid: str
    created: datetime
    since: datetime  # its gang waits
    lifted: bool
    pods: int
    pod_spec: Json = field(hash=False)
    retry_at: datetime | None = None
    scheduling: Scheduling = field(default_factory=Scheduling)
    on_demand: int = 0  # of the pods
    domain: str = ""
    standing: Standing = field(default_factory=Standing)


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """A pod of ours on a node, as far as others keep away from it or it from them."""

    namespace: str
    labels: Json = field(default_factory=dict, hash=False)
    keeps_away: tuple[Json, ...] = field(default=(), hash=False)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What pods of ours, of one priority, take of a node, and who they are to those that keep away from them."""

    node: str
    amounts: Amounts = field(hash=False)
    tenants: tuple[Tenant, ...] = ()
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class Platform:
    """What this installation is: the same for all jobs."""

    sidecar_image: str
    agents_url: str
    ca_bundle: str
    sidecar_pull_policy: str = "IfNotPresent"
    metadata_url: str = ""
    dcgm_url: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    network_policies: bool = True
    disruption_budgets: bool = True


@dataclass(frozen=True, kw_only=True)
class Observed:
    """All that one decision depends on, besides the time."""

    job: Job
    status: Status
    platform: Platform
    job_key: str = ""
    nonce: str = ""  # a fresh publication id, should one be needed
    started_at: datetime | None = None  # this operator's own start
    pods: tuple[PodView, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    reports: tuple[Report, ...] = ()
    line: Line | None = None  # the gangs that wait; None: not known yet of this job, or of no matter to it
    usage: tuple[Usage, ...] = ()
    refusal: Refusal | None = None
    applied: str = ""  # digest of the children that this process applied last
    published: int = -1  # revision that this process published last
    jobs: int = 1  # how many there are, this one included
    rendezvous_ip: str = ""  # of the Service that leads to the host of a c10d store; empty: not known yet

    @cached_property
    def _pods_by_uid(self) -> Mapping[str, PodView]:
        return {pod.uid: pod for pod in reversed(self.pods)}

    @cached_property
    def _nodes_by_name(self) -> Mapping[str, NodeView]:
        return {node.name: node for node in reversed(self.nodes)}

    @cached_property
    def _reports_by_uid(self) -> Mapping[str, Report]:
        return {report.pod_uid: report for report in reversed(self.reports)}

    def pod(self, uid: str) -> PodView | None:
        """The pod of this UID."""
        return self._pods_by_uid.get(uid) if uid else None

    def pod_named(self, name: str) -> PodView | None:
        """The existing pod of this name."""
        return next((pod for pod in self.pods if pod.name == name and not pod.absent), None)

    def node(self, name: str) -> NodeView | None:
        """The node of this name."""
        return self._nodes_by_name.get(name) if name else None

    def report(self, uid: str) -> Report | None:
        """The newest report of this pod."""
        return self._reports_by_uid.get(uid) if uid else None

    def silent_for(self, uid: str, now: datetime) -> timedelta:
        """How long this process, which may have begun later, has waited for a word of this pod."""
        own = self.report(uid)
        waited = [time for time in (self.started_at, own.received_at if own else None) if time is not None]
        return now - max(waited) if waited else timedelta(0)

    def warmed_up(self, now: datetime) -> bool:
        """Whether missing reports mean anything yet."""
        return self.started_at is None or now - self.started_at >= c.START_GRACE


def parse_pod(body: Json, *, absent: bool = False) -> PodView:
    """A pod of ours from the API's JSON."""
    meta, spec, status = _part(body, "metadata"), _part(body, "spec"), _part(body, "status")
    labels = meta.get("labels") or _EMPTY
    conditions = {str(item.get("type")): item for item in status.get("conditions") or ()}
    trainer = trainer_container(spec) if spec.get("containers") else ""
    statuses = list(status.get("containerStatuses") or ())
    own = next((item for item in statuses if item.get("name") == trainer), _EMPTY)
    gates = [str(gate.get("name")) for gate in spec.get("schedulingGates") or ()]
    return PodView(
        name=str(meta.get("name", "")),
        uid=str(meta.get("uid", "")),
        incarnation=_number(labels.get(c.LABEL_INCARNATION)),
        created=parse_time(meta.get("creationTimestamp")),
        deleted_at=parse_time(meta.get("deletionTimestamp")),
        absent=absent,
        phase=str(status.get("phase", "Pending")),
        node=str(spec.get("nodeName") or ""),
        ip=str(status.get("podIP") or ""),
        gated=c.GANG_GATE in gates,
        held_by=tuple(gate for gate in gates if gate != c.GANG_GATE),
        unschedulable=_unschedulable(conditions.get("PodScheduled", _EMPTY)),
        disruption=_true_reason(conditions.get("DisruptionTarget", _EMPTY)),
        waiting=_waiting([*(status.get("initContainerStatuses") or ()), *statuses]),
        exit=_exit(_part(_part(own, "state"), "terminated")),
        running_since=parse_time(_part(_part(own, "state"), "running").get("startedAt")),
        conditions=_same(
            tuple((key, str(item.get("status")), str(item.get("reason"))) for key, item in conditions.items())
        ),
        containers_ended=_containers_ended(status, conditions),
        failure=": ".join(str(status[key]) for key in ("reason", "message") if status.get(key)),
        grace_seconds=int(spec.get("terminationGracePeriodSeconds") or 30),
        index_label=str(labels.get(c.LABEL_INDEX, "")),
        priority=priority_of(spec),
        preempts=spec.get("preemptionPolicy") != c.NEVER_PREEMPTS,
        nominated=bool(status.get("nominatedNodeName")),
    )


def priority_of(pod_spec: Json) -> int:
    """What admission wrote into a pod; the scheduler takes none for 0."""
    return int(pod_spec.get("priority") or 0)


@lru_cache(maxsize=1024)
def _same(conditions: Conditions) -> Conditions:
    """Those of ten thousand pods are a handful."""
    return conditions


def _containers_ended(status: Json, conditions: Mapping[str, Json]) -> bool:
    """All ended, or the kubelet rejected the pod before it made any of them.

    Where the garbage collector writes the phase, the node is away: what it did not tell may still run.
    """
    statuses = list(status.get("containerStatuses") or ())
    if statuses:
        return all(_part(item, "state").get("terminated") for item in statuses)
    collected = _true_reason(conditions.get("DisruptionTarget", _EMPTY)) == "DeletionByPodGC"
    return status.get("phase") in ("Failed", "Succeeded") and not collected


def _unschedulable(condition: Json) -> str:
    failed = condition.get("status") == "False" and condition.get("reason") == "Unschedulable"
    return str(condition.get("message") or "") if failed else ""


def _true_reason(condition: Json) -> str:
    return str(condition.get("reason") or "Unknown") if condition.get("status") == "True" else ""


def _waiting(statuses: Iterable[Json]) -> tuple[tuple[str, str, str], ...]:
    found = []
    for status in statuses:
        waiting = _part(_part(status, "state"), "waiting")
        if waiting.get("reason"):
            words = hide_secrets(str(waiting.get("message") or ""))
            found.append((str(status.get("name", "")), str(waiting["reason"]), words))
    return tuple(found)


def _exit(terminated: Json) -> Exit | None:
    """The container's end, with what the launcher left in the termination log where it did."""
    if not terminated:
        return None
    code, reason = int(terminated.get("exitCode") or 0), str(terminated.get("reason") or "")
    left = _termination_log(str(terminated.get("message") or ""))
    if left is None:
        return Exit(code=code, reason=reason, message=hide_secrets(str(terminated.get("message") or "")))
    return Exit(
        code=code,
        reason=reason if reason == "OOMKilled" else str(left.get("reason") or reason),
        cause=str(left.get("cause") or ""),
        message=hide_secrets(str(left.get("message") or "")),
        traceback=tuple(hide_secrets(str(line)) for line in _list(left.get("traceback"))),
        final=bool(left.get("final")),
    )


def _termination_log(message: str) -> Json | None:
    try:
        left = loads(message.encode(errors="replace"))
    except ValueError:
        return None
    known = isinstance(left, dict) and left.get("version") == c.PROTOCOL_VERSION
    return left if known else None


def parse_node(body: Json, lease: Json | None = None) -> NodeView:
    """A node from the API's JSON, with its lease where it was read."""
    meta, spec, status = _part(body, "metadata"), _part(body, "spec"), _part(body, "status")
    ready = next((item for item in status.get("conditions") or () if item.get("type") == "Ready"), _EMPTY)
    lease_spec = _part(lease or _EMPTY, "spec")
    return NodeView(
        name=str(meta.get("name", "")),
        ready=ready.get("status") == "True",
        unschedulable=bool(spec.get("unschedulable")),
        taints=tuple(
            (str(taint.get("key", "")), str(taint.get("value") or ""), str(taint.get("effect", "")))
            for taint in spec.get("taints") or ()
        ),
        boot_id=str(_part(status, "nodeInfo").get("bootID") or ""),
        mark=mark_of(body),
        labels=meta.get("labels") or {},
        allocatable=status.get("allocatable") or {},
        lease_renewed=parse_time(lease_spec.get("renewTime")),
        lease_seconds=int(lease_spec.get("leaseDurationSeconds") or 40),
    )


def parse_report(body: Json, received_at: datetime) -> Report | None:
    """``report.json``; None for a version that is not known here."""
    pod, launcher = _part(body, "pod"), body.get("launcher")
    if body.get("version") != c.PROTOCOL_VERSION or not pod.get("uid"):
        return None
    notices = _objects(body.get("notices"))[-c.MAX_NOTICES_TOLD :]
    base = Report(
        pod_uid=str(pod["uid"]),
        received_at=received_at,
        silent_seconds=_float(body.get("launcherSilentSeconds")),
        notices=tuple(map(_notice, notices)),
        gpu_errors=tuple(filter(None, map(_gpu_error, _objects(body.get("gpu"))[: c.MAX_GPU_ERRORS]))),
        preflight=_preflight(body.get("preflight")),
        unheard=_unheard(body),
    )
    if not isinstance(launcher, Mapping) or launcher.get("version") != c.PROTOCOL_VERSION:
        return base
    try:
        return _with_launcher(base, launcher)
    except (TypeError, ValueError, AttributeError, KeyError):
        # Agents are other programs of other versions: what cannot be read is as if it had not been said.
        return base


def _with_launcher(base: Report, launcher: Json) -> Report:
    ports = _part(launcher, "ports")
    by_touch_file = _objects(launcher.get("notices"))[-c.MAX_NOTICES_TOLD :]
    seen = {notice.id: notice for notice in (*base.notices, *map(_notice, by_touch_file))}
    return Report(
        pod_uid=base.pod_uid,
        received_at=base.received_at,
        has_launcher=True,
        silent_seconds=base.silent_seconds,
        ready=launcher.get("ready") is True,
        store=_int(ports.get("store")) or c.PORT_STORE,
        control=_int(ports.get("control")) or c.PORT_CONTROL,
        accepted=_pair(launcher.get("accepted")),
        started=_pair(launcher.get("started")),
        world=_world(launcher.get("world")),
        restored=_restored(_part(launcher, "restored")),
        phase=_said(launcher.get("phase")),
        message=_words(launcher.get("message")),
        committed_step=_int(launcher.get("committedStep")),
        committed_at=parse_time(launcher.get("committedAt")),
        checkpoints=_checkpoints(_part(launcher, "checkpoints")),
        highest_claim=_claim(launcher.get("highestClaim")),
        foreign_claims=tuple(
            filter(None, map(_claim, _of_pairs(launcher.get("foreignClaims"))[-c.MAX_CLAIMS_TOLD :]))
        ),
        quarantined=tuple(
            Quarantined(path=_said(item["path"]), reason=_words(item.get("reason")))
            for item in _objects(launcher.get("quarantined"))[: c.QUARANTINED_KEPT]
            if _said(item.get("path"))
        ),
        loss=_float(launcher.get("loss")),
        throughput=_float(launcher.get("throughput")),
        incidents=tuple(filter(None, map(_told, _of_pairs(launcher.get("incidents"))[: c.MAX_INCIDENTS_TOLD]))),
        notices=tuple(seen.values()),
        gpu_errors=base.gpu_errors,
        preflight=base.preflight,
        lost_members=tuple(
            _name(item.get("podUID")) for item in _objects(launcher.get("lostMembers"))[: c.MAX_WORKERS]
        ),
        conflict=_int(launcher.get("conflict")) or 0,
        checkpointing=any(rank.get("phase") == "checkpoint" for rank in _objects(launcher.get("ranks"))),
        exit=_launcher_exit(launcher.get("exit")),
        books=_books(_part(launcher, "accounting")),
        unheard=base.unheard + _unheard(launcher),
    )


def _unheard(value: Json) -> int:
    """Entries of its lists that are too many."""
    return sum(max(0, len(_list(value.get(name))) - most) for name, most in _HEARD.items())


def _books(accounting: Json) -> Spent:
    """Whole seconds by cause. What is booked under a cause that is not known here counts as attributed to none."""
    told = dict(_part(accounting, "seconds"))
    known = [_whole(told.pop(name, None)) for name in c.SPENT[:-1]]
    return short([*known, sum(map(_whole, (*told.values(), accounting.get("unattributedSeconds"))))])


def _whole(value: Any) -> int:
    seconds = _float(value)
    return 0 if seconds is None else round(min(max(seconds, 0.0), float(c.MAX_NUMBER)))


def _told(value: Json) -> Told | None:
    pair = _pair(value)
    if pair is None:
        return None
    return Told(
        pair=pair,
        cause=_said(value.get("cause")),
        action=_said(value.get("action")),
        reason=_said(value.get("reason")),
        message=_words(value.get("message")),
        pod=_text(value.get("pod")),
        rank=_int(value.get("rank")),
        exit_code=_int(value.get("exitCode")),
        node=_text(value.get("node")),
        detected=parse_time(value.get("detectedTime")),
        resumed=parse_time(value.get("resumedTime")),
        lost_steps=_int(value.get("lostSteps")),
        restored_from=_origin(value.get("restoredFrom")),
        part_of=_pair(value.get("partOf")),
    )


def _origin(value: Any) -> str | None:
    return (_text(value) or "")[: c.MAX_ORIGIN] or None


def _restored(value: Json) -> Restored | None:
    step = _int(value.get("step"))
    return None if step is None else Restored(step=step, origin=_origin(value.get("from")))


def _checkpoints(tiers: Json) -> tuple[Checkpoint, ...]:
    found = []
    for tier, value in islice(tiers.items(), c.MAX_TIERS):
        pair = _pair(value)
        time, step = (parse_time(value.get("time")), _int(value.get("step"))) if pair else (None, None)
        if pair is not None and time is not None and step is not None:
            found.append(Checkpoint(step=step, pair=pair, tier=_name(tier), time=time))
    return tuple(found)


def _claim(value: Any) -> Json | None:
    """A claim with exactly the contract's fields."""
    pair = _pair(value)
    if pair is None:
        return None
    from_pair = _pair(value.get("fromPair"))
    return {
        "version": c.PROTOCOL_VERSION,
        "jobUID": _said(value.get("jobUID")),
        "publication": _said(value.get("publication")),
        **pair.to_json(),
        "fromStep": _int(value.get("fromStep")) or 0,
        "fromPair": from_pair.to_json() if from_pair else None,
    }


def _world(value: Any) -> World | None:
    pair = _pair(value)
    if pair is None:
        return None
    return World(
        pair=pair,
        publication=_said(value.get("publication")),
        members=tuple(map(_name, _list(value.get("members"))[: c.MAX_WORKERS])),
        coordinator=_said(value.get("coordinator")),
    )


def _launcher_exit(value: Any) -> Exit | None:
    if not isinstance(value, Mapping) or _int(value.get("code")) is None:
        return None
    return Exit(
        code=int(value["code"]),
        cause=_said(value.get("cause")),
        reason=_said(value.get("reason")),
        message=_words(value.get("message")),
        final=bool(value.get("final")),
    )


def _notice(value: Any) -> Notice:
    value = value if isinstance(value, Mapping) else _EMPTY
    return Notice(
        id=_said(value.get("id")),
        reason=_said(value.get("reason")),
        source=_said(value.get("source")),
        action=str(value.get("action") or ("terminate" if value.get("drain") else "")),
    )


def _gpu_error(value: Json) -> GpuError | None:
    """None of what names neither a GPU nor a kind."""
    gpu, kind, xid = _text(value.get("gpu")), _text(value.get("kind")), _int(value.get("xid"))
    if not gpu or not kind:
        return None
    return GpuError(
        gpu=gpu[: c.MAX_NAME],
        kind=kind[: c.MAX_NAME],
        xid=xid if xid is not None and xid > 0 else None,
        count=max(_int(value.get("count")) or 1, 1),
        cause=cause if (cause := _text(value.get("cause"))) in c.CAUSES else "",
        action=(_text(value.get("action")) or "")[: c.MAX_NAME],
        message=_words(value.get("message")),
        since=parse_time(value.get("firstTime")),
        time=parse_time(value.get("lastTime")),
    )


def _preflight(value: Any) -> Preflight | None:
    if not isinstance(value, Mapping):
        return None
    checks = _objects(value.get("checks"))[: c.MAX_CHECKS]
    return Preflight(
        checks=tuple(
            Check(
                name=(_text(check.get("name")) or "")[: c.MAX_NAME],
                result=(_text(check.get("result")) or "")[: c.MAX_NAME],
                message=_words(check.get("message")),
                unreached=tuple(map(_name, _list(check.get("unreached"))[: c.MAX_UNREACHED])),
                of_the_job=check.get("blame") == "Job",
            )
            for check in checks
        )
    )


def _objects(value: Any) -> tuple[Json, ...]:
    return tuple(item for item in value or () if isinstance(item, Mapping)) if isinstance(value, list) else ()


def _of_pairs(value: Any) -> list[Json]:
    """Those that have a pair, the lowest first."""
    found = [(pair, item) for item in _objects(value) if (pair := _pair(item)) is not None]
    return [item for _pair, item in sorted(found, key=lambda both: both[0])]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _part(value: Json, key: str) -> Json:
    found = value.get(key)
    return found if isinstance(found, Mapping) else _EMPTY


def _int(value: Any) -> int | None:
    exact = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= c.MAX_NUMBER
    return value if exact else None


def _pair(value: Any) -> Pair | None:
    """A pair; a malformed one if its numbers are larger than all that can be written into the status."""
    pair = parse_pair(value)
    if pair is None or max(abs(pair.generation), abs(pair.attempt)) > c.MAX_NUMBER:
        return None
    return pair


def _float(value: Any) -> float | None:
    """A number that a status can hold: JSON has none that is not finite."""
    exact = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return float(value) if exact else None


def _text(value: Any) -> str | None:
    return value[: c.MAX_MESSAGE] if isinstance(value, str) else None


def _said(value: Any) -> str:
    """Words of an agent; empty for what is none."""
    return _text(value) or ""


def _words(value: Any) -> str:
    """A message for people, who are more than those that may read the pod's log."""
    return hide_secrets(_said(value))


def _name(value: Any) -> str:
    return _said(value)[: c.MAX_NAME]


def _number(value: Any) -> int:
    return int(value) if str(value).isdigit() else -1
