"""What the operator remembers of a job, all of it in the resource's status.

Each type reads itself back from JSON (``from_json`` drops what it cannot read and keeps the rest) and writes
itself (``to_json``). Nothing else survives a restart of the operator, and nothing else is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar

from holdfast_operator import constants as c
from holdfast_operator.api import Json, Pair, format_seconds, format_time, parse_pair, parse_time, shorten
from holdfast_operator.tally import Offender, Tally

T = TypeVar("T")
_REASON = re.compile(r"[^A-Za-z0-9_]")
_NO_WORLD = Pair(generation=0, attempt=0)


class Phase(StrEnum):
    """Where a worker is on its one-way street."""

    WANTED = "Wanted"  # counts as one of the replicas
    LEAVING = "Leaving"  # still there, asked to go; its replacement is asked for
    LOST = "Lost"  # taken for dead, not proved gone
    ENDED = "Ended"  # proved gone


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One incarnation: a pod name that is used once."""

    incarnation: int
    batch: int
    phase: Phase = Phase.WANTED
    gated: bool = False
    avoid: tuple[str, ...] = ()
    spare: bool = False  # made to stand by; that it has a rank since, the membership tells
    on_demand: bool = False  # it stays off spot capacity
    domain: str = ""  # the value of the label by which the job is packed
    pod_uid: str = ""
    node: str = ""
    boot_id: str = ""
    grace_seconds: int = 30
    since: datetime | None = None
    bound_at: datetime | None = None
    ready_at: datetime | None = None
    absent_since: datetime | None = None
    cause: str = ""
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    final: bool = False
    pair: Pair | None = None
    counted: bool = False
    ordered: bool = False  # it goes because we say so: no incident
    symptoms: tuple[str, ...] = ()  # what was seen of it while it ran, and has been answered

    @property
    def known(self) -> bool:
        """Whether its pod was seen: a pod that vanished is then lost, not waiting to be created."""
        return bool(self.pod_uid)

    def to_json(self) -> dict[str, Any]:
        """Sparse: what has its default value is left out."""
        return _sparse(
            {
                "incarnation": self.incarnation,
                "batch": self.batch,
                "phase": str(self.phase),
                "gated": self.gated,
                "avoid": list(self.avoid),
                "spare": self.spare,
                "onDemand": self.on_demand,
                "domain": self.domain,
                "podUID": self.pod_uid,
                "node": self.node,
                "bootID": self.boot_id,
                "graceSeconds": self.grace_seconds,
                "since": _time(self.since),
                "boundAt": _time(self.bound_at),
                "readyAt": _time(self.ready_at),
                "absentSince": _time(self.absent_since),
                "cause": self.cause,
                "reason": self.reason,
                "message": self.message,
                "exitCode": self.exit_code,
                "final": self.final,
                "pair": self.pair.to_json() if self.pair else None,
                "counted": self.counted,
                "ordered": self.ordered,
                "symptoms": list(self.symptoms),
            }
        )

    @classmethod
    def from_json(cls, value: Json) -> Worker:
        """Read back."""
        return cls(
            incarnation=int(value["incarnation"]),
            batch=int(value.get("batch", value["incarnation"])),
            phase=Phase(value.get("phase", Phase.WANTED)),
            gated=bool(value.get("gated", False)),
            avoid=tuple(map(str, _items(value.get("avoid")))),
            spare=bool(value.get("spare", False)),
            on_demand=bool(value.get("onDemand", False)),
            domain=str(value.get("domain") or ""),
            pod_uid=str(value.get("podUID") or ""),
            node=str(value.get("node") or ""),
            boot_id=str(value.get("bootID") or ""),
            grace_seconds=int(value.get("graceSeconds", 30)),
            since=parse_time(value.get("since")),
            bound_at=parse_time(value.get("boundAt")),
            ready_at=parse_time(value.get("readyAt")),
            absent_since=parse_time(value.get("absentSince")),
            cause=str(value.get("cause") or ""),
            reason=str(value.get("reason") or ""),
            message=str(value.get("message") or ""),
            exit_code=_int_or_none(value.get("exitCode")),
            final=bool(value.get("final", False)),
            pair=parse_pair(value.get("pair")),
            counted=bool(value.get("counted", False)),
            ordered=bool(value.get("ordered", False)),
            symptoms=tuple(map(str, _items(value.get("symptoms")))),
        )


@dataclass(frozen=True, kw_only=True)
class Member:
    """A place in a generation."""

    index: int
    pod: str
    pod_uid: str
    ip: str
    store: int
    control: int
    node: str

    def to_json(self) -> dict[str, Any]:
        """As in ``membership.json``."""
        return {
            "index": self.index,
            "pod": self.pod,
            "podUID": self.pod_uid,
            "ip": self.ip,
            "ports": {"store": self.store, "control": self.control},
            "node": self.node,
        }

    @classmethod
    def from_json(cls, value: Json) -> Member:
        """Read back."""
        ports = _dict(value.get("ports"))
        return cls(
            index=int(value["index"]),
            pod=str(value.get("pod", "")),
            pod_uid=str(value["podUID"]),
            ip=str(value.get("ip", "")),
            store=int(ports.get("store", c.PORT_STORE)),
            control=int(ports.get("control", c.PORT_CONTROL)),
            node=str(value.get("node", "")),
        )


@dataclass(frozen=True, kw_only=True)
class Previous:
    """An earlier generation whose members may still believe in it; with ``through``, numbers never published."""

    generation: int
    publication: str
    members: tuple[str, ...]
    through: int | None = None

    def to_json(self) -> dict[str, Any]:
        """As in ``membership.json``."""
        entry = {"generation": self.generation, "publication": self.publication, "members": list(self.members)}
        return entry if self.through is None else {**entry, "through": self.through}

    @classmethod
    def from_json(cls, value: Json) -> Previous:
        """Read back."""
        return cls(
            generation=int(value["generation"]),
            publication=str(value.get("publication", "")),
            members=tuple(map(str, _items(value.get("members")))),
            through=None if value.get("through") is None else int(value["through"]),
        )


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The published generation and all that launchers need to judge it."""

    revision: int = 0
    generation: int = 0
    publication: str = ""
    active: Pair | None = None
    previous: tuple[Previous, ...] = ()
    gone: tuple[str, ...] = ()
    claims: tuple[Json, ...] = field(default=(), hash=False)
    members: tuple[Member, ...] = ()
    acknowledged: tuple[Pair, ...] = ()
    checkpoint: Json | None = field(default=None, hash=False)
    drain: tuple[str, ...] = ()

    def member_uids(self) -> tuple[str, ...]:
        """Pod UIDs in order of index."""
        return tuple(member.pod_uid for member in sorted(self.members, key=lambda member: member.index))

    def named(self) -> frozenset[str]:
        """Pod UIDs of this and all earlier generations that may still live."""
        return frozenset([*self.member_uids(), *(uid for entry in self.previous for uid in entry.members)])

    def to_json(self) -> dict[str, Any]:
        """As in the resource's status."""
        return {
            "revision": self.revision,
            "generation": self.generation,
            "publication": self.publication,
            "active": self.active.to_json() if self.active else None,
            "previous": [previous.to_json() for previous in self.previous],
            "gone": list(self.gone),
            "claims": [dict(claim) for claim in self.claims],
            "members": [member.to_json() for member in self.members],
            "acknowledged": [pair.to_json() for pair in self.acknowledged],
            "directives": {
                "checkpoint": dict(self.checkpoint) if self.checkpoint else None,
                "drain": list(self.drain),
            },
        }

    @classmethod
    def from_json(cls, value: Json) -> Membership:
        """Read back."""
        directives = _dict(value.get("directives"))
        return cls(
            revision=_number(value.get("revision")),
            generation=_number(value.get("generation")),
            publication=str(value.get("publication") or ""),
            active=parse_pair(value.get("active")),
            previous=_tuple(value.get("previous"), Previous.from_json),
            gone=tuple(map(str, _items(value.get("gone")))),
            claims=tuple(_claim(claim) for claim in _items(value.get("claims")) if isinstance(claim, Mapping)),
            members=_tuple(value.get("members"), Member.from_json),
            acknowledged=tuple(filter(None, map(parse_pair, _items(value.get("acknowledged"))))),
            checkpoint=_dict(directives.get("checkpoint")) or None,
            drain=tuple(map(str, _items(directives.get("drain")))),
        )


@dataclass(frozen=True, kw_only=True)
class Count:
    """Incidents of one cause: since ever and the times of those within the window."""

    cause: str
    total: int = 0
    times: tuple[datetime, ...] = ()

    def within(self, now: datetime, seconds: float) -> tuple[datetime, ...]:
        """Those that still count."""
        return tuple(time for time in self.times if (now - time).total_seconds() < seconds)

    def to_json(self) -> dict[str, Any]:
        """As in the resource's status."""
        return {
            "cause": self.cause,
            "count": len(self.times),
            "total": self.total,
            "windowStart": _time(self.times[0]) if self.times else None,
            "lastTime": _time(self.times[-1]) if self.times else None,
            "times": [format_time(time) for time in self.times],
        }

    @classmethod
    def from_json(cls, value: Json) -> Count:
        """Read back."""
        times = tuple(filter(None, map(parse_time, _items(value.get("times")))))
        return cls(cause=str(value["cause"]), total=int(value.get("total") or len(times)), times=times)


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One failure, from detection to resumption."""

    number: int
    pair: Pair
    cause: str
    action: str
    reason: str
    message: str
    pod: str | None
    rank: int | None
    node: str | None
    detected: datetime
    resumed: datetime | None = None
    lost_steps: int | None = None
    decision: str = ""
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """As in the resource's status."""
        return {
            "number": self.number,
            **self.pair.to_json(),
            "cause": self.cause,
            "action": self.action,
            "reason": self.reason,
            "message": self.message,
            "pod": self.pod,
            "rank": self.rank,
            "node": self.node,
            "detectedTime": format_time(self.detected),
            "resumedTime": _time(self.resumed),
            "lostSteps": self.lost_steps,
            "decision": self.decision or None,
            "why": self.why or None,
        }

    @classmethod
    def from_json(cls, value: Json) -> Incident:
        """Read back."""
        detected = parse_time(value.get("detectedTime"))
        pair = parse_pair(value)
        if detected is None or pair is None:
            raise ValueError("an incident without time or pair")
        return cls(
            number=_number(value.get("number")),
            pair=pair,
            cause=str(value.get("cause") or c.CAUSE_INFRASTRUCTURE),
            action=str(value.get("action") or ""),
            reason=reason_word(str(value.get("reason") or "Unknown")),
            message=str(value.get("message") or ""),
            pod=value.get("pod"),
            rank=_int_or_none(value.get("rank")),
            node=value.get("node"),
            detected=detected,
            resumed=parse_time(value.get("resumedTime")),
            lost_steps=_int_or_none(value.get("lostSteps")),
            decision=str(value.get("decision") or ""),
            why=str(value.get("why") or ""),
        )


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A metav1.Condition."""

    type: str
    status: bool
    reason: str
    message: str
    observed_generation: int
    since: datetime

    def to_json(self) -> dict[str, Any]:
        """As in the resource's status."""
        return {
            "type": self.type,
            "status": "True" if self.status else "False",
            "reason": self.reason,
            "message": self.message,
            "observedGeneration": self.observed_generation,
            "lastTransitionTime": format_seconds(self.since),
        }

    @classmethod
    def from_json(cls, value: Json) -> Condition:
        """Read back."""
        since = parse_time(value.get("lastTransitionTime"))
        if since is None:
            raise ValueError("a condition without time")
        return cls(
            type=str(value["type"]),
            status=value.get("status") == "True",
            reason=str(value.get("reason") or ""),
            message=str(value.get("message") or ""),
            observed_generation=_number(value.get("observedGeneration")),
            since=since,
        )


@dataclass(frozen=True, kw_only=True)
class AvoidedNode:
    """A node on which no new worker of this job is placed for now."""

    node: str
    reason: str
    until: datetime
    boot_id: str = ""
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        """As in the resource's status."""
        until = format_time(self.until)
        entry = {"node": self.node, "reason": self.reason, "until": until, "bootID": self.boot_id}
        return {**entry, "message": self.message} if self.message else entry

    @classmethod
    def from_json(cls, value: Json) -> AvoidedNode:
        """Read back."""
        until = parse_time(value.get("until"))
        if until is None:
            raise ValueError("an avoided node without end")
        return cls(
            node=str(value["node"]),
            reason=str(value.get("reason") or ""),
            until=until,
            boot_id=str(value.get("bootID") or ""),
            message=str(value.get("message") or ""),
        )


@dataclass(frozen=True, kw_only=True)
class Gang:
    """The wait for all workers to start together."""

    attempts: int = 0
    since: datetime | None = None
    lifted_at: datetime | None = None
    retry_at: datetime | None = None
    size: int | None = None  # fewer than all, where the job may begin with them

    def to_json(self) -> dict[str, Any]:
        """As in the resource's status."""
        return {
            "attempts": self.attempts,
            "since": _time(self.since),
            "liftedAt": _time(self.lifted_at),
            "retryAt": _time(self.retry_at),
            "size": self.size,
        }

    @classmethod
    def from_json(cls, value: Json) -> Gang:
        """Read back."""
        return cls(
            attempts=_number(value.get("attempts")),
            since=parse_time(value.get("since")),
            lifted_at=parse_time(value.get("liftedAt")),
            retry_at=parse_time(value.get("retryAt")),
            size=_int_or_none(value.get("size")),
        )


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Why workers cannot start, with the same words as in condition and event."""

    reason: str
    message: str
    since: datetime

    def to_json(self) -> dict[str, Any]:
        """As in the resource's status."""
        return {"reason": self.reason, "message": self.message, "since": format_time(self.since)}

    @classmethod
    def from_json(cls, value: Json) -> Trouble:
        """Read back."""
        since = parse_time(value.get("since"))
        if since is None:
            raise ValueError("trouble without time")
        return cls(reason=str(value["reason"]), message=str(value.get("message") or ""), since=since)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The newest durable commit."""

    step: int
    pair: Pair
    tier: str
    time: datetime

    def to_json(self) -> dict[str, Any]:
        """As in the resource's status."""
        return {"step": self.step, **self.pair.to_json(), "tier": self.tier, "time": format_time(self.time)}

    @classmethod
    def from_json(cls, value: Json) -> Checkpoint:
        """Read back."""
        pair, time = parse_pair(value), parse_time(value.get("time"))
        if pair is None or time is None:
            raise ValueError("a checkpoint without pair or time")
        return cls(step=int(value["step"]), pair=pair, tier=str(value.get("tier") or ""), time=time)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where training began or, after a suspension, went on. ``after``: the last generation before that."""

    after: int = 0
    pair: Pair | None = None
    step: int = 0
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        """As in the resource's status."""
        nobody: Mapping[str, int | None] = {"generation": None, "attempt": None}
        pair = self.pair.to_json() if self.pair else nobody
        return {"after": self.after, **pair, "step": self.step, "message": self.message}

    @classmethod
    def from_json(cls, value: Json) -> Origin:
        """Read back."""
        return cls(
            after=_number(value.get("after")),
            pair=parse_pair(value),
            step=_number(value.get("step")),
            message=str(value.get("message") or ""),
        )


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The newest committed step."""

    step: int
    loss: float | None = None
    throughput: float | None = None
    time: datetime | None = None

    def to_json(self) -> dict[str, Any]:
        """As in the resource's status."""
        return {"step": self.step, "loss": self.loss, "throughput": self.throughput, "time": _time(self.time)}

    @classmethod
    def from_json(cls, value: Json) -> Progress:
        """Read back."""
        return cls(
            step=_number(value.get("step")),
            loss=value.get("loss"),
            throughput=value.get("throughput"),
            time=parse_time(value.get("time")),
        )


@dataclass(frozen=True, kw_only=True)
class Status:
    """All of it."""

    observed_generation: int = 0
    conditions: tuple[Condition, ...] = ()
    status: str = ""
    ready: str = ""
    replicas: int = 0
    selector: str = ""
    restart_count: int = 0
    incarnations: int = 0
    membership: Membership = Membership()
    restarts: tuple[Count, ...] = ()
    incidents: tuple[Incident, ...] = ()
    forgotten: Pair = _NO_WORLD  # the highest world whose incident fell off that list
    last_checkpoint: Checkpoint | None = None
    progress: Progress | None = None
    origin: Origin = Origin()
    avoided: tuple[AvoidedNode, ...] = ()
    gang: Gang = Gang()
    workers: tuple[Worker, ...] = ()
    extra: int = 0  # workers wanted beyond replicas
    grown_at: datetime | None = None
    trouble: Trouble | None = None
    backoff_until: datetime | None = None
    stalled_since: datetime | None = None
    counted_batch: int = -1
    tallies: tuple[Tally, ...] = ()
    offenders: tuple[Offender, ...] = ()
    document: str = ""
    quarantined: tuple[str, ...] = ()
    start_time: datetime | None = None
    completion_time: datetime | None = None

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type."""
        return next((condition for condition in self.conditions if condition.type == kind), None)

    def holds(self, kind: str) -> bool:
        """Whether the condition of this type is true."""
        condition = self.condition(kind)
        return condition is not None and condition.status

    @property
    def terminal(self) -> bool:
        """Complete or Failed: for good."""
        return self.holds(c.COMPLETE) or self.holds(c.FAILED)

    def forgot(self, pair: Pair) -> bool:
        """Whether the incident of a world was recorded, and fell off the list since."""
        return pair <= self.forgotten and all(incident.pair != pair for incident in self.incidents)

    def in_phase(self, *phases: Phase) -> tuple[Worker, ...]:
        """Workers in one of these phases."""
        return tuple(worker for worker in self.workers if worker.phase in phases)

    def with_worker(self, changed: Worker) -> Status:
        """The same with one worker replaced, found by incarnation."""
        kept = (changed if worker.incarnation == changed.incarnation else worker for worker in self.workers)
        return replace(self, workers=tuple(kept))

    def to_json(self) -> dict[str, Any]:
        """As in the resource's status."""
        return {
            "observedGeneration": self.observed_generation,
            "conditions": [condition.to_json() for condition in self.conditions],
            "status": self.status,
            "ready": self.ready,
            "replicas": self.replicas,
            "selector": self.selector,
            "restartCount": self.restart_count,
            "incarnations": self.incarnations,
            "membership": self.membership.to_json(),
            "restarts": [count.to_json() for count in self.restarts],
            "incidents": [incident.to_json() for incident in self.incidents],
            "lastCheckpoint": self.last_checkpoint.to_json() if self.last_checkpoint else None,
            "progress": self.progress.to_json() if self.progress else None,
            "startedFrom": self.origin.to_json(),
            "avoidedNodes": [avoided.to_json() for avoided in self.avoided],
            "gang": self.gang.to_json(),
            "placement": {
                "workers": [worker.to_json() for worker in self.workers],
                "extra": self.extra,
                "grownAt": _time(self.grown_at),
                "trouble": self.trouble.to_json() if self.trouble else None,
                "backoffUntil": _time(self.backoff_until),
                "stalledSince": _time(self.stalled_since),
                "countedBatch": self.counted_batch,
                "forgotten": self.forgotten.to_json(),
                "tallies": [tally.to_json() for tally in self.tallies],
                "offenders": [offender.to_json() for offender in self.offenders],
                "document": self.document,
                "quarantined": list(self.quarantined),
            },
            "startTime": _time(self.start_time),
            "completionTime": _time(self.completion_time),
        }

    @classmethod
    def from_json(cls, value: Json) -> Status:
        """Read back. A part that cannot be read is dropped: its neighbours stay."""
        placement = _dict(value.get("placement"))
        incidents = _tuple(value.get("incidents"), Incident.from_json)
        return cls(
            observed_generation=_number(value.get("observedGeneration")),
            conditions=_tuple(value.get("conditions"), Condition.from_json),
            status=str(value.get("status") or ""),
            ready=str(value.get("ready") or ""),
            replicas=_number(value.get("replicas")),
            selector=str(value.get("selector") or ""),
            restart_count=_number(value.get("restartCount")),
            incarnations=_number(value.get("incarnations")),
            membership=Membership.from_json(_dict(value.get("membership"))),
            restarts=_tuple(value.get("restarts"), Count.from_json),
            incidents=incidents,
            forgotten=parse_pair(placement.get("forgotten")) or _below(incidents),
            last_checkpoint=_optional(value.get("lastCheckpoint"), Checkpoint.from_json),
            progress=_optional(value.get("progress"), Progress.from_json),
            origin=Origin.from_json(_dict(value.get("startedFrom"))),
            avoided=_tuple(value.get("avoidedNodes"), AvoidedNode.from_json),
            gang=Gang.from_json(_dict(value.get("gang"))),
            workers=_tuple(placement.get("workers"), Worker.from_json),
            extra=max(0, _number(placement.get("extra"))),
            grown_at=parse_time(placement.get("grownAt")),
            trouble=_optional(placement.get("trouble"), Trouble.from_json),
            backoff_until=parse_time(placement.get("backoffUntil")),
            stalled_since=parse_time(placement.get("stalledSince")),
            counted_batch=_number(placement.get("countedBatch"), -1),
            tallies=_tuple(placement.get("tallies"), Tally.from_json),
            offenders=_tuple(placement.get("offenders"), Offender.from_json),
            document=str(placement.get("document") or ""),
            quarantined=tuple(map(str, _items(placement.get("quarantined")))),
            start_time=parse_time(value.get("startTime")),
            completion_time=parse_time(value.get("completionTime")),
        )


def reason_word(text: str) -> str:
    """A reason that the API server accepts."""
    word = _REASON.sub("", text)[:128]
    return word if word and word[0].isalpha() else "Unknown"


def say(text: str) -> str:
    """A message that fits everywhere it is shown."""
    return shorten(text.strip())


def _below(incidents: tuple[Incident, ...]) -> Pair:
    """What an earlier release, which kept no note of it, may have forgotten: all below those of a full list."""
    if len(incidents) < c.MAX_INCIDENTS:
        return _NO_WORLD
    lowest = min(incident.pair for incident in incidents)
    return Pair(generation=lowest.generation, attempt=max(0, lowest.attempt - 1))


def _claim(value: Json) -> Json:
    """As in the contract: the API server keeps no null, and a claim says so where it goes on from nothing."""
    return {**value, "fromPair": value.get("fromPair")}


def _sparse(value: dict[str, Any]) -> dict[str, Any]:
    keep = ("incarnation", "batch", "phase", "exitCode", "graceSeconds")
    return {key: item for key, item in value.items() if item or (key in keep and item is not None)}


def _time(value: datetime | None) -> str | None:
    return format_time(value) if value else None


def _int_or_none(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _dict(value: Any) -> Json:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any, default: int = 0) -> int:
    found = _int_or_none(value)
    return default if found is None else found


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _optional(value: Any, read: Callable[[Json], T]) -> T | None:
    found = _tuple([value], read)
    return found[0] if found else None


def _tuple(values: Any, read: Callable[[Json], T]) -> tuple[T, ...]:
    found = []
    for value in _items(values):
        try:
            found.append(read(value))
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    return tuple(found)
