"""The reports of sidecars about their pods and launchers, with the fields that this version supports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.json import EMPTY, Json, integer, items, objects, part
from holdfast_operator.api.reasons import Cause, cause_of
from holdfast_operator.api.status import Checkpoint, Claim
from holdfast_operator.api.status.goodput import TimeBreakdown, short
from holdfast_operator.api.status.json_fields import FLAT, JsonFields, readable, stored
from holdfast_operator.api.times import parse_time
from holdfast_operator.views import values
from holdfast_operator.views.pods import Exit

# The number of entries that are read from each list of a report.
_HEARD = {
    "incidents": c.MAX_INCIDENTS_TOLD,
    "foreignClaims": c.MAX_CLAIMS_TOLD,
    "notices": c.MAX_NOTICES_TOLD,
    "quarantined": c.QUARANTINED_KEPT,
    "lostMembers": c.MAX_WORKERS,
    "gpu": c.MAX_GPU_ERRORS,
    "slowRanks": c.MAX_SLOW_RANKS,
}


def _origin(value: Any) -> str | None:
    return values.said(value)[: c.MAX_ORIGIN] or None


def _names(value: Any, most: int) -> tuple[str, ...]:
    return tuple(map(values.name, items(value)[:most]))


def _all(kind: Any, value: Any, most: int) -> tuple[Any, ...]:
    """Return the readable objects among the first ones in a list."""
    return tuple(filter(None, (readable(kind, item) for item in objects(value)[:most])))


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A cloud's announcement, as a sidecar reported it."""

    id: str
    reason: str
    source: str
    action: str

    @property
    def leaves(self) -> bool:
        """Whether the cloud will take the node; a recommendation does not count."""
        return self.action in c.NOTICE_ACTIONS_LEAVING

    @property
    def advises(self) -> bool:
        """Whether the cloud may take the node soon, so that no new worker should be placed there."""
        return not self.leaves and self.action not in c.NOTICE_ACTIONS_PASSING


@dataclass(frozen=True, kw_only=True)
class World(JsonFields):
    """A running world, as a launcher reported it."""

    attempt_id: AttemptId = stored(FLAT, read=values.attempt_id)
    publication: str = stored("publication", missing="", read=values.said)
    members: tuple[str, ...] = stored("members", missing=(), read=lambda found: _names(found, c.MAX_WORKERS))
    coordinator: str = stored("coordinator", missing="", read=values.said)


@dataclass(frozen=True, kw_only=True)
class Restored(JsonFields):
    """The checkpoint from which a world resumed, as a launcher reports after its first step."""

    step: int
    origin: str | None = stored("from", read=_origin)


@dataclass(frozen=True, kw_only=True)
class ReportedIncident(JsonFields):
    """An incident, as a launcher reported it."""

    attempt_id: AttemptId = stored(FLAT, read=values.attempt_id)
    cause: Cause = stored("cause", missing=Cause.INFRASTRUCTURE)
    action: str = stored("action", missing="", read=values.said)
    reason: str = stored("reason", missing="", read=values.said)
    message: str = stored("message", missing="", read=values.words)
    pod: str | None = stored("pod", read=values.text)
    rank: int | None
    exit_code: int | None
    node: str | None = stored("node", read=values.text)
    detected: datetime | None = stored("detectedTime")
    resumed: datetime | None = stored("resumedTime")
    lost_steps: int | None
    restored_from: str | None = stored("restoredFrom", default=None, read=_origin)
    part_of: AttemptId | None = stored(
        "partOf", default=None, read=values.attempt_id
    )  # the incident that includes it


@dataclass(frozen=True, kw_only=True)
class Quarantined(JsonFields):
    """A corrupt checkpoint that was quarantined."""

    path: str = stored("path", read=lambda found: values.said(found) or None)
    reason: str = stored("reason", missing="", read=values.words)


@dataclass(frozen=True, kw_only=True)
class ReportedDivergence(JsonFields):
    """The last comparison in which the state of a rank of this launcher differed from that of other replicas."""

    rank: int
    step: int
    tensor: str = stored("tensor", missing="", read=values.words)
    repaired: bool = False
    time: datetime


@dataclass(frozen=True, kw_only=True)
class ReportedDivergences(JsonFields):
    """How often a rank of this launcher differed since the launcher's start."""

    count: int = 0
    last: ReportedDivergence | None = None


@dataclass(frozen=True, kw_only=True)
class Unsaved(JsonFields):
    """The reason why no checkpoint has reached the shared tier since the last durable one."""

    since: datetime  # the time of the first failure, by the node's clock
    cause: str = stored("cause", missing="", read=values.said)  # a value of docs/reference/metrics.md
    message: str = stored("message", missing="", read=values.words)


@dataclass(frozen=True, kw_only=True)
class SlowRank(JsonFields):
    """A rank for which the others wait, with its own seconds per step and those of the median rank."""

    rank: int
    pod: str = stored("pod", missing="", read=values.name)
    node: str = stored("node", missing="", read=values.name)
    seconds: float = stored("seconds", missing=0.0, read=values.real)
    median_seconds: float = stored("medianSeconds", missing=0.0, read=values.real)
    activity: str = stored("activity", missing="", read=values.name)  # data or compute, whichever takes longer


@dataclass(frozen=True, kw_only=True)
class GpuError(JsonFields):
    """An error of one of the worker's GPUs, which its sidecar read from the node's exporter.

    There is one entry per GPU, kind and XID. A repetition raises ``count`` and ``time``.
    """

    gpu: str = stored("gpu", read=lambda found: values.name(found) or None)  # UUID
    kind: str = stored("kind", read=lambda found: values.name(found) or None)  # docs/reference/sidecar.md
    xid: int | None = stored("xid", default=None, read=lambda found: max(integer(found) or 0, 0) or None)
    count: int = stored("count", default=1, read=lambda found: max(integer(found) or 1, 1))
    cause: Cause | None = None  # as the sidecar decided it
    action: str = stored("action", default="", read=values.name)  # Ignore, InPlace, RecreatePod or ReplaceNode
    message: str = stored("message", default="", read=values.words)
    since: datetime | None = stored("firstTime", default=None)  # when it was first observed, by the node's clock
    time: datetime | None = stored("lastTime", default=None)  # when it was last observed


@dataclass(frozen=True, kw_only=True)
class Check(JsonFields):
    """One check of a worker's preflight."""

    name: str = stored("name", missing="", read=values.name)
    result: str = stored("result", missing="", read=values.name)
    message: str = stored("message", missing="", read=values.words)
    # UIDs of the pods that the Network check does not reach
    unreached: tuple[str, ...] = stored("unreached", default=(), read=lambda found: _names(found, c.MAX_UNREACHED))
    # whether the job's settings caused the failure, on any node
    of_the_job: bool = stored("blame", default=False, read=lambda found: found == "Job")


@dataclass(frozen=True, kw_only=True)
class Preflight(JsonFields):
    """The results of a sidecar's checks of its node before the worker may join."""

    checks: tuple[Check, ...] = stored("checks", missing=(), read=lambda found: _all(Check, found, c.MAX_CHECKS))

    @property
    def passed(self) -> bool:
        """Whether no check runs or has failed."""
        return all(check.result in ("Passed", "Skipped") for check in self.checks)

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.result == "Failed")

    def result(self, name: str) -> str:
        """Return the result of a check; empty if there is none of this name."""
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
    accepted: AttemptId | None = None
    started: AttemptId | None = None
    world: World | None = None
    restored: Restored | None = None
    phase: str = ""
    message: str = ""
    committed_step: int | None = None
    committed_at: datetime | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    unsaved: Unsaved | None = None  # None: the last checkpoint on the shared tier did not fail
    slow_ranks: tuple[SlowRank, ...] = ()  # of the whole world; only the launcher of rank 0 reports them
    highest_claim: Claim | None = None
    foreign_claims: tuple[Claim, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()
    divergences: ReportedDivergences | None = None  # None: no rank differed
    loss: float | None = None
    throughput: float | None = None
    incidents: tuple[ReportedIncident, ...] = ()
    notices: tuple[Notice, ...] = ()
    gpu_errors: tuple[GpuError, ...] = ()
    preflight: Preflight | None = None  # None: the pod was not asked to run one
    lost_members: tuple[str, ...] = ()
    conflict: int = 0
    checkpointing: bool = False  # one of its ranks writes a checkpoint
    exit: Exit | None = None
    books: TimeBreakdown = ()  # the use of its ranks' seconds since the launcher's start
    unheard: int = 0  # list entries that exceed the limits and are ignored

    def fresh(self, now: datetime) -> bool:
        """Return whether the report describes the present state."""
        return now - self.received_at <= c.REPORT_FRESH

    @property
    def highest_attempt_id(self) -> AttemptId | None:
        """The highest attempt ID that the launcher reports as started."""
        attempt_ids = [
            attempt_id for attempt_id in (self.started, self.world.attempt_id if self.world else None) if attempt_id
        ]
        return max(attempt_ids, default=None)


def parse_report(body: Json, received_at: datetime) -> Report | None:
    """Parse ``report.json``; None for an unknown version."""
    pod, launcher = part(body, "pod"), body.get("launcher")
    if body.get("version") != c.PROTOCOL_VERSION or not pod.get("uid"):
        return None
    notices = objects(body.get("notices"))[-c.MAX_NOTICES_TOLD :]
    base = Report(
        pod_uid=str(pod["uid"]),
        received_at=received_at,
        silent_seconds=values.real(body.get("launcherSilentSeconds")),
        notices=tuple(map(_notice, notices)),
        gpu_errors=_all(GpuError, body.get("gpu"), c.MAX_GPU_ERRORS),
        preflight=readable(Preflight, body.get("preflight")),
        unheard=_unheard(body),
    )
    if not isinstance(launcher, Mapping) or launcher.get("version") != c.PROTOCOL_VERSION:
        return base
    try:
        return _with_launcher(base, launcher)
    except (TypeError, ValueError, AttributeError, KeyError):
        # Agents may have other versions: what cannot be read is treated as absent.
        return base


def _with_launcher(base: Report, launcher: Json) -> Report:
    ports = part(launcher, "ports")
    by_touch_file = objects(launcher.get("notices"))[-c.MAX_NOTICES_TOLD :]
    # A launcher has only the notices of its touch file. The sidecar's have the cloud's data.
    seen = {notice.id: notice for notice in (*map(_notice, by_touch_file), *base.notices)}
    return Report(
        pod_uid=base.pod_uid,
        received_at=base.received_at,
        has_launcher=True,
        silent_seconds=base.silent_seconds,
        ready=launcher.get("ready") is True,
        store=integer(ports.get("store")) or c.PORT_STORE,
        control=integer(ports.get("control")) or c.PORT_CONTROL,
        accepted=values.attempt_id(launcher.get("accepted")),
        started=values.attempt_id(launcher.get("started")),
        world=readable(World, launcher.get("world")),
        restored=readable(Restored, launcher.get("restored")),
        phase=values.said(launcher.get("phase")),
        message=values.words(launcher.get("message")),
        committed_step=integer(launcher.get("committedStep")),
        committed_at=parse_time(launcher.get("committedAt")),
        checkpoints=_checkpoints(part(launcher, "checkpoints")),
        unsaved=readable(Unsaved, part(launcher, "checkpointsFailing").get(c.SHARED_TIER)),
        slow_ranks=_all(SlowRank, launcher.get("slowRanks"), c.MAX_SLOW_RANKS),
        highest_claim=_claim(launcher.get("highestClaim")),
        foreign_claims=tuple(
            filter(None, map(_claim, values.with_attempt_ids(launcher.get("foreignClaims"))[-c.MAX_CLAIMS_TOLD :]))
        ),
        quarantined=_all(Quarantined, launcher.get("quarantined"), c.QUARANTINED_KEPT),
        divergences=readable(ReportedDivergences, launcher.get("divergences")),
        loss=values.real(launcher.get("loss")),
        throughput=values.real(launcher.get("throughput")),
        incidents=_all(ReportedIncident, values.with_attempt_ids(launcher.get("incidents")), c.MAX_INCIDENTS_TOLD),
        notices=tuple(seen.values()),
        gpu_errors=base.gpu_errors,
        preflight=base.preflight,
        lost_members=tuple(
            values.name(item.get("podUID")) for item in objects(launcher.get("lostMembers"))[: c.MAX_WORKERS]
        ),
        conflict=integer(launcher.get("conflict")) or 0,
        checkpointing=any(rank.get("phase") == "checkpoint" for rank in objects(launcher.get("ranks"))),
        exit=_launcher_exit(launcher.get("exit")),
        books=_books(part(launcher, "accounting")),
        unheard=base.unheard + _unheard(launcher),
    )


def _unheard(value: Json) -> int:
    """Return the number of list entries that exceed the limits."""
    return sum(max(0, len(items(value.get(name))) - most) for name, most in _HEARD.items())


def _books(accounting: Json) -> TimeBreakdown:
    """Return whole seconds by category. Unknown categories count as unattributed."""
    told = dict(part(accounting, "seconds"))
    known = [values.whole(told.pop(name, None)) for name in c.SPENT[:-1]]
    return short([*known, sum(map(values.whole, (*told.values(), accounting.get("unattributedSeconds"))))])


def _checkpoints(tiers: Json) -> tuple[Checkpoint, ...]:
    found = []
    for tier, value in islice(tiers.items(), c.MAX_TIERS):
        attempt_id = values.attempt_id(value)
        time, step = (parse_time(value.get("time")), integer(value.get("step"))) if attempt_id else (None, None)
        if attempt_id is not None and time is not None and step is not None:
            found.append(Checkpoint(step=step, attempt_id=attempt_id, tier=values.name(tier), time=time))
    return tuple(found)


def _claim(value: Any) -> Claim | None:
    attempt_id = values.attempt_id(value)
    if attempt_id is None:
        return None
    return Claim(
        attempt_id=attempt_id,
        job_uid=values.said(value.get("jobUID")),
        publication=values.said(value.get("publication")),
        from_step=integer(value.get("fromStep")) or 0,
        from_attempt_id=values.attempt_id(value.get("fromPair")),
    )


def _launcher_exit(value: Any) -> Exit | None:
    if not isinstance(value, Mapping) or integer(value.get("code")) is None:
        return None
    return Exit(
        code=int(value["code"]),
        cause=cause_of(value.get("cause")),
        reason=values.said(value.get("reason")),
        message=values.words(value.get("message")),
        final=bool(value.get("final")),
    )


def _notice(value: Any) -> Notice:
    value = value if isinstance(value, Mapping) else EMPTY
    return Notice(
        id=values.said(value.get("id")),
        reason=values.said(value.get("reason")),
        source=values.said(value.get("source")),
        action=str(value.get("action") or ("terminate" if value.get("drain") else "")),
    )
