"""The resource as frozen dataclasses: what a user asked for, and the names that follow from it.

Parsing refuses by name what it does not understand (``UnreadableError``); the API server's schema has
refused most of it before. ``status.py`` holds what the operator itself wrote.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.fields import choice as _choice
from holdfast_operator.api.fields import integer as _integer
from holdfast_operator.api.fields import items as _list
from holdfast_operator.api.fields import mapping as _mapping
from holdfast_operator.api.fields import number as _number
from holdfast_operator.api.pod_template import check as _check_pod_spec
from holdfast_operator.api.preflight import PreflightSpec, parse_preflight
from holdfast_operator.api.processes import processes
from holdfast_operator.api.recovery import Escalation, Rule, parse_escalation, parse_hang_rule, parse_rules
from holdfast_operator.errors import UnreadableError

Json = Mapping[str, Any]

_DURATION = re.compile(r"^([1-9][0-9]{0,6})(s|m|h)$")
_UNIT = {"s": 1, "m": 60, "h": 3600}
_METRIC = re.compile(r"[A-Za-z_][\w./-]{0,63}", re.ASCII)
_QUANTITY = re.compile(r"^([1-9][0-9]{0,8})(k|M|G|Ki|Mi|Gi)?$")
_FACTOR = {None: 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


@dataclass(frozen=True, kw_only=True, order=True)
class AttemptId:
    """(generation, attempt): orders all worlds of a job."""

    generation: int
    attempt: int

    def to_json(self) -> dict[str, int]:
        """As in the contract."""
        return {"generation": self.generation, "attempt": self.attempt}

    def __str__(self) -> str:
        return f"{self.generation}.{self.attempt}"


def parse_pair(value: Any) -> AttemptId | None:
    """A pair of the contract, or None for null and for what is none."""
    if not isinstance(value, Mapping):
        return None
    generation, attempt = value.get("generation"), value.get("attempt")
    if not isinstance(generation, int) or not isinstance(attempt, int):
        return None
    return AttemptId(generation=generation, attempt=attempt)


def parse_time(value: Any) -> datetime | None:
    """RFC 3339 in UTC, or None."""
    if not isinstance(value, str) or not value:
        return None
    try:
        parsed = datetime.fromisoformat(value)
        return parsed.astimezone(UTC) if parsed.tzinfo else parsed.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


def format_time(value: datetime) -> str:
    """As in the contract: UTC, microseconds, ``Z``."""
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def format_seconds(value: datetime) -> str:
    """As Kubernetes' own times: UTC, whole seconds, ``Z``."""
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How many incidents of one cause a job may have within a window."""

    cause: str
    max_restarts: int
    window_seconds: int = c.DEFAULT_WINDOW_SECONDS


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """Wait before the n-th restart: initial · 2^(n-1), at most max."""

    initial_seconds: int = 5
    max_seconds: int = 300
    jitter_percent: int = 10

    def seconds(self, count: int) -> float:
        """Wait before restart number ``count`` (from 1)."""
        if count <= 0:
            return 0.0
        return float(min(self.max_seconds, self.initial_seconds * 2 ** min(count - 1, 20)))


@dataclass(frozen=True, kw_only=True)
class ObjectSpec:
    """A store of objects to which commits are copied."""

    url: str
    secret_name: str | None = None
    interval_seconds: int = 0
    keep_last: int = 3
    retention: str = ""  # as CheckpointSpec has it
    bytes_per_second: int | None = None
    max_in_flight: int | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """Where and how often training state is committed."""

    claim_name: str | None = None
    interval: str = "300s"
    full_every: int = 1
    delta_threshold: float = 0.0
    keep_last: int = 3
    retention: str = ""  # what is kept beside them, in the words that launchers read: hours=6,daily=7
    resume: str = c.RESUME_ALWAYS
    object_store: ObjectSpec | None = None
    memory: str = ""  # the size of the memory tier's volume; none without
    memory_interval: int = 1
    peer_interval: int | None = None
    local: str = ""  # the size of the volume on each node's disk; none without
    local_interval: int = 10
    # Most bytes a second: of all ranks together to the volume, of each to another node and to its own node's disk.
    bytes_per_second: int | None = None
    peer_bytes_per_second: int | None = None
    local_bytes_per_second: int | None = None
    # Of each rank at once: writes to the volume and to its node's disk, reads from one other node's memory.
    max_in_flight: int | None = None
    local_in_flight: int | None = None
    peer_in_flight: int | None = None


@dataclass(frozen=True, kw_only=True)
class HangSpec:
    """How long a rank may keep the others waiting."""

    step: str = "Auto"  # Auto, Off, or seconds
    data: int = 900
    checkpoint: int = 900
    evaluation: int = 3600


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    """Where workers may go, beyond what their template says."""

    on_demand: int = 0  # so many of them stay off spot capacity
    topology_key: str = ""
    topology_policy: str = ""
    exclusive_nodes: bool = False
    queue: str = ""  # of Kueue; it admits each worker
    gang: bool = True  # the first workers wait behind gates until there is room for all

    @property
    def packed_by(self) -> str:
        """The label whose value all workers share; empty if they need not."""
        return self.topology_key if self.topology_policy == c.PACKED else ""

    @property
    def spread_by(self) -> str:
        """The label over whose values they are spread; empty if they are not."""
        return self.topology_key if self.topology_policy == c.SPREAD else ""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What the user asked for."""

    replicas: int
    template: Json = field(hash=False)
    spares: int = 0
    processes_per_worker: int = 1
    min_replicas: int = 1
    replica_step: int = 1
    max_replicas: int = 0  # at least replicas, once parsed
    rendezvous: str = c.HOLDFAST
    on_failure: str = c.SHRINK
    shrink_after_seconds: int = 0
    grow_cooldown_seconds: int = 300
    budgets: tuple[Budget, ...] = (Budget(cause=c.CAUSE_APPLICATION, max_restarts=3),)
    backoff: Backoff = Backoff()
    rules: tuple[Rule, ...] = ()
    escalation: Escalation | None = None
    avoid_repeat_offenders: int = 0
    checkpoint: CheckpointSpec = CheckpointSpec()
    startup_deadline_seconds: int = 1200
    remediation_opt_out: bool = False
    scheduling: Scheduling = Scheduling()
    hang: HangSpec | None = None  # None: as the launchers have it
    preflight: PreflightSpec | None = None
    providers: tuple[str, ...] = c.PROVIDERS
    checkpoint_deadline_seconds: int = 25
    suspend: bool = False
    active_deadline_seconds: int | None = None
    ttl_seconds: int | None = None  # after the end; None: the job stays

    @property
    def drain_seconds(self) -> int:
        """How long a drained launcher may take for its commit. Nobody is in a hurry where the job is suspended."""
        if not self.suspend:
            return self.checkpoint_deadline_seconds
        return max(self.checkpoint_deadline_seconds, (self.hang or HangSpec()).checkpoint)

    @property
    def launched(self) -> bool:
        """Whether Holdfast's launcher runs in the workers; else what they do inside is not known."""
        return self.rendezvous == c.HOLDFAST

    @property
    def shrinkable(self) -> bool:
        """Whether a smaller world than all of a generation may train."""
        return self.on_failure == c.SHRINK

    @property
    def pod_spec(self) -> Json:
        """The user's pod spec."""
        spec: Json = self.template["spec"]
        return spec

    def budget(self, cause: str) -> Budget | None:
        """The budget of a cause; None: without limit."""
        return next((budget for budget in self.budgets if budget.cause == cause), None)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One resource as read: identity, what was asked for, what was written before."""

    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str
    created: datetime
    deleting: bool = False
    spec: JobSpec | None = None
    unreadable: str = ""
    raw_status: Json = field(default_factory=dict, hash=False)

    @property
    def key(self) -> str:
        """Key in queue and caches."""
        return f"{self.namespace}/{self.name}"


def parse_job(body: Json) -> Job:
    """A resource; never raises on a spec that cannot be read: ``unreadable`` then says why."""
    meta = body.get("metadata") or {}
    spec: JobSpec | None = None
    unreadable = str(body.get("unread") or "")  # of ``slim_job``
    try:
        spec = None if body.get("unread") else parse_spec(body.get("spec"))
    except UnreadableError as error:
        unreadable = str(error)
    raw_status = body.get("status")
    return Job(
        namespace=str(meta.get("namespace", "")),
        name=str(meta.get("name", "")),
        uid=str(meta.get("uid", "")),
        generation=int(meta.get("generation") or 0),
        resource_version=str(meta.get("resourceVersion", "")),
        created=parse_time(meta.get("creationTimestamp")) or datetime.fromtimestamp(0, UTC),
        deleting=bool(meta.get("deletionTimestamp")),
        spec=spec,
        unreadable=unreadable,
        raw_status=raw_status if isinstance(raw_status, Mapping) else {},
    )


def parse_spec(value: Any) -> JobSpec:
    """The spec of a resource. Raises ``UnreadableError`` with the path of what is wrong."""
    spec = _mapping(value, "spec")
    workers = _mapping(spec.get("workers"), "spec.workers")
    elasticity = _mapping(spec.get("elasticity", {}), "spec.elasticity")
    recovery = _mapping(spec.get("recovery", {}), "spec.recovery")
    interruption = _mapping(spec.get("interruption", {}), "spec.interruption")
    replicas = _integer(workers, "replicas", "spec.workers", minimum=1)
    template = _template(workers.get("template"))
    return JobSpec(
        replicas=replicas,
        template=template,
        spares=_integer(workers, "spares", "spec.workers", 0, minimum=0),
        processes_per_worker=_processes(workers, template["spec"]),
        min_replicas=_integer(elasticity, "minReplicas", "spec.elasticity", replicas, minimum=1),
        replica_step=_integer(elasticity, "replicaStep", "spec.elasticity", 1, minimum=1),
        max_replicas=max(replicas, _optional(elasticity, "maxReplicas", "spec.elasticity", minimum=1) or 0),
        rendezvous=_choice(
            _mapping(spec.get("rendezvous", {}), "spec.rendezvous"),
            "backend",
            "spec.rendezvous",
            (c.HOLDFAST, c.C10D, c.NO_RENDEZVOUS),
            c.HOLDFAST,
        ),
        on_failure=_choice(elasticity, "onFailure", "spec.elasticity", (c.SHRINK, c.REPLACE, c.WAIT), c.SHRINK),
        shrink_after_seconds=_integer(elasticity, "shrinkAfterSeconds", "spec.elasticity", 0, minimum=0),
        grow_cooldown_seconds=_integer(elasticity, "growCooldownSeconds", "spec.elasticity", 300, minimum=0),
        budgets=_budgets(recovery),
        backoff=_backoff(recovery),
        rules=(*parse_rules(recovery), *parse_hang_rule(spec)),
        escalation=parse_escalation(recovery),
        avoid_repeat_offenders=_integer(recovery, "avoidRepeatOffenders", "spec.recovery", 0, minimum=0),
        checkpoint=_checkpoint(_mapping(spec.get("checkpoint", {}), "spec.checkpoint")),
        startup_deadline_seconds=_integer(spec, "startupDeadlineSeconds", "spec", 1200, minimum=1),
        remediation_opt_out=_mapping(spec.get("nodeRemediation", {}), "spec.nodeRemediation").get("optOut") is True,
        scheduling=parse_scheduling(spec),
        hang=_hang(spec),
        preflight=parse_preflight(spec),
        providers=tuple(
            map(str, _list(interruption.get("providers", list(c.PROVIDERS)), "spec.interruption.providers"))
        ),
        checkpoint_deadline_seconds=_integer(
            interruption, "checkpointDeadlineSeconds", "spec.interruption", 25, minimum=1
        ),
        suspend=spec.get("suspend") is True,
        active_deadline_seconds=_optional(spec, "activeDeadlineSeconds", "spec", minimum=1),
        ttl_seconds=_optional(spec, "ttlSecondsAfterFinished", "spec", minimum=0),
    )


def parse_scheduling(spec: Json) -> Scheduling:
    """What a job's spec says of placement. Raises ``UnreadableError``."""
    path = "spec.scheduling"
    value = _mapping(spec.get("scheduling", {}), path)
    workers = _mapping(spec.get("workers"), "spec.workers")
    return Scheduling(
        on_demand=_integer(workers, "onDemandReplicas", "spec.workers", 0, minimum=0),
        topology_key=str(value.get("topologyKey") or ""),
        topology_policy=_choice(value, "topologyPolicy", path, ("", c.SPREAD, c.PACKED), ""),
        exclusive_nodes=value.get("exclusiveNodes") is True,
        queue=str(value.get("queue") or ""),
        gang=_choice(value, "gang", path, (c.GATES, c.NO_GANG), c.GATES) == c.GATES,
    )


def _template(value: Any) -> Json:
    template = _mapping(value, "spec.workers.template")
    pod = _mapping(template.get("spec"), "spec.workers.template.spec")
    containers = _list(pod.get("containers"), "spec.workers.template.spec.containers")
    if not containers:
        raise UnreadableError("spec.workers.template.spec.containers is empty")
    for number, container in enumerate(containers):
        path = f"spec.workers.template.spec.containers[{number}]"
        if not isinstance(_mapping(container, path).get("name"), str):
            raise UnreadableError(f"{path}.name is missing")
    _check_pod_spec(pod, "spec.workers.template.spec")
    _mapping(template.get("metadata") or {}, "spec.workers.template.metadata")
    return template


def _processes(workers: Json, pod_spec: Json) -> int:
    name = trainer_container(pod_spec)
    trainer = next(container for container in pod_spec["containers"] if container["name"] == name)
    return processes(workers.get("processesPerWorker", 1), trainer, "spec.workers.processesPerWorker")


def _budgets(recovery: Json) -> tuple[Budget, ...]:
    default = [{"cause": c.CAUSE_APPLICATION, "maxRestarts": 3}]
    path = "spec.recovery.budgets"
    return tuple(
        Budget(
            cause=_choice(_mapping(item, path), "cause", path, c.CAUSES, None),
            max_restarts=_integer(item, "maxRestarts", path, minimum=0),
            window_seconds=_integer(item, "windowSeconds", path, c.DEFAULT_WINDOW_SECONDS, minimum=1),
        )
        for item in _list(recovery.get("budgets", default), path)
    )


def _backoff(recovery: Json) -> Backoff:
    path = "spec.recovery.backoff"
    value = _mapping(recovery.get("backoff", {}), path)
    return Backoff(
        initial_seconds=_integer(value, "initialSeconds", path, 5, minimum=0),
        max_seconds=_integer(value, "maxSeconds", path, 300, minimum=0),
        jitter_percent=min(100, _integer(value, "jitterPercent", path, 10, minimum=0)),
    )


def _checkpoint(value: Json) -> CheckpointSpec:
    volume = _mapping(value.get("volume", {}), "spec.checkpoint.volume")
    retention = _mapping(value.get("retention", {}), "spec.checkpoint.retention")
    memory = _mapping(value.get("memory", {}), "spec.checkpoint.memory")
    peer = value.get("peer")
    local = _mapping(value.get("local", {}), "spec.checkpoint.local")
    claim = volume.get("claimName")
    return CheckpointSpec(
        claim_name=str(claim) if claim else None,
        interval=_interval(value.get("interval", "5m")),
        full_every=_integer(value, "fullEvery", "spec.checkpoint", 1, minimum=1),
        delta_threshold=_number(value, "deltaThreshold", "spec.checkpoint", 0.0, maximum=1.0),
        keep_last=_integer(retention, "keepLast", "spec.checkpoint.retention", 3, minimum=1),
        retention=_rules(retention, "spec.checkpoint.retention"),
        resume=_choice(value, "resume", "spec.checkpoint", ("Always", "Never"), c.RESUME_ALWAYS),
        object_store=None if value.get("object") is None else _object_store(value["object"]),
        memory=str(memory.get("sizeLimit", "")),
        memory_interval=_integer(memory, "interval", "spec.checkpoint.memory", 1, minimum=1),
        peer_interval=None if peer is None else _peer_interval(peer),
        local=str(local.get("sizeLimit", "")),
        local_interval=_integer(local, "interval", "spec.checkpoint.local", 10, minimum=1),
        bytes_per_second=_bandwidth(value, "spec.checkpoint"),
        peer_bytes_per_second=None if peer is None else _bandwidth(peer, "spec.checkpoint.peer"),
        local_bytes_per_second=_bandwidth(local, "spec.checkpoint.local"),
        max_in_flight=_in_flight(value, "spec.checkpoint"),
        local_in_flight=_in_flight(local, "spec.checkpoint.local"),
        peer_in_flight=None if peer is None else _in_flight(peer, "spec.checkpoint.peer"),
    )


def _bandwidth(value: Json, path: str) -> int | None:
    limit = value.get("bandwidthLimit")
    return None if limit is None else _bytes(str(limit), f"{path}.bandwidthLimit")


def _in_flight(value: Json, path: str) -> int | None:
    if value.get("maxInFlight") is None:
        return None
    return _integer(value, "maxInFlight", path, 1, minimum=1, maximum=c.MOST_IN_FLIGHT)


def _rules(retention: Json, path: str) -> str:
    counts = {rule: _integer(retention, field, path, 0, minimum=0) for rule, field in c.RETENTION_RULES.items()}
    counted = [f"{rule}={count}" for rule, count in counts.items() if count]
    best = _list(retention.get("keepBest", []), f"{path}.keepBest")
    return ",".join([*counted, *(_best(one, f"{path}.keepBest[{index}]") for index, one in enumerate(best))])


def _best(given: Any, path: str) -> str:
    """`best=val_loss:min:3`, as launchers read it."""
    value = _mapping(given, path)
    metric = str(value.get("metric", ""))
    if _METRIC.fullmatch(metric) is None:
        raise UnreadableError(f"{path}.metric must be a name like val_loss or eval/loss, not {metric[:80]!r}")
    mode = _choice(value, "mode", path, (c.BEST_MIN, c.BEST_MAX), c.BEST_MIN)
    return f"best={metric}:{mode.lower()}:{_integer(value, 'count', path, 1, minimum=1)}"


def _peer_interval(value: Any) -> int:
    path = "spec.checkpoint.peer"
    return _integer(_mapping(value, path), "interval", path, 1, minimum=1)


def _object_store(given: Any) -> ObjectSpec:
    path = "spec.checkpoint.object"
    value = _mapping(given, path)
    secret = _mapping(value.get("secretRef", {}), f"{path}.secretRef").get("name")
    retention = _mapping(value.get("retention", {}), f"{path}.retention")
    return ObjectSpec(
        url=str(value.get("url", "")).rstrip("/"),
        secret_name=str(secret) if secret else None,
        interval_seconds=_seconds(value.get("interval", "0s"), f"{path}.interval"),
        keep_last=_integer(retention, "keepLast", f"{path}.retention", 3, minimum=1),
        retention=_rules(retention, f"{path}.retention"),
        bytes_per_second=_bandwidth(value, path),
        max_in_flight=_in_flight(value, path),
    )


def _seconds(value: Any, path: str) -> int:
    """``5m`` is 300; ``0s`` means no wait at all."""
    match = _DURATION.match(str(value))
    if match is None and str(value) not in ("0", "0s"):
        raise UnreadableError(f"{path} is not a duration: {str(value)!r}")
    return int(match[1]) * _UNIT[match[2]] if match else 0


def _bytes(text: str, path: str) -> int:
    """``100Mi`` is 104857600."""
    match = _QUANTITY.match(text)
    if match is None:
        raise UnreadableError(f"{path} is not a number of bytes: {text!r}")
    return int(match[1]) * _FACTOR[match[2]]


def _hang(spec: Json) -> HangSpec | None:
    if spec.get("hangDetection") is None:
        return None
    path = "spec.hangDetection"
    value = _mapping(spec["hangDetection"], path)
    step = str(value.get("stepTimeout", "Auto"))
    if step not in ("Auto", "Off") and not (step.isdecimal() and int(step) >= 1):
        raise UnreadableError(f"{path}.stepTimeout must be Auto, Off or seconds, not {step!r}")
    return HangSpec(
        step=step,
        data=_integer(value, "dataTimeoutSeconds", path, 900, minimum=1),
        checkpoint=_integer(value, "checkpointTimeoutSeconds", path, 900, minimum=1),
        evaluation=_integer(value, "evaluationTimeoutSeconds", path, 3600, minimum=1),
    )


def _interval(value: Any) -> str:
    """``50`` (steps) and ``Auto`` stay, durations become seconds: ``5m`` is ``300s``."""
    text = str(value)
    if text == "Auto":
        return text
    if text.isdigit() and int(text) >= 1:
        return str(int(text))
    match = _DURATION.match(text)
    if match is None:
        raise UnreadableError(f"spec.checkpoint.interval is neither steps nor a duration nor Auto: {text!r}")
    return f"{int(match[1]) * _UNIT[match[2]]}s"


def _optional(value: Json, key: str, path: str, *, minimum: int) -> int | None:
    return None if value.get(key) is None else _integer(value, key, path, minimum=minimum)


def pod_name(job: str, incarnation: int) -> str:
    """Name of a worker's pod; never used twice."""
    return f"{job}-w{incarnation}"


def ca_config_map(job: str) -> str:
    """Name of the ConfigMap with the operator's CA bundle."""
    return f"{job}-holdfast-ca"


def rendezvous_service(job: str) -> str:
    """Name of the Service that leads to the pod that hosts a ``c10d`` store."""
    return f"{job}-rendezvous"


def run_id(job: Job) -> str:
    """Id that torch's rendezvous and logs show."""
    return f"{job.name}-{job.uid[:8]}"


def trainer_container(pod_spec: Json) -> str:
    """Name of the supervised container: ``trainer``, or the first."""
    names = [str(container.get("name", "")) for container in pod_spec.get("containers") or []]
    return c.TRAINER_CONTAINER if c.TRAINER_CONTAINER in names else names[0]


def shorten(text: str, limit: int = c.MAX_MESSAGE) -> str:
    """At most ``limit`` characters, the end kept: the last lines of a traceback say most."""
    return text if len(text) <= limit else "…" + text[-(limit - 1) :]
