"""What sidecars report of their pods and launchers, as far as it is understood."""

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
from holdfast_operator.api.times import parse_time
from holdfast_operator.views import values
from holdfast_operator.views.pods import Exit

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

    pair: AttemptId
    publication: str
    members: tuple[str, ...]
    coordinator: str


@dataclass(frozen=True, kw_only=True)
class Restored:
    """From where a world goes on, as a launcher tells once it has made a step."""

    step: int
    origin: str | None


@dataclass(frozen=True, kw_only=True)
class ReportedIncident:
    """An incident in a launcher's words."""

    pair: AttemptId
    cause: Cause
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
    part_of: AttemptId | None = None  # of the incident that it is counted with


@dataclass(frozen=True, kw_only=True)
class Quarantined:
    """A checkpoint that was damaged and set aside."""

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Unsaved:
    """Why the volume has taken no checkpoint since the last durable one."""

    since: datetime  # of the first that failed; by the node's clock
    cause: str  # a word of docs/reference/metrics.md
    message: str


@dataclass(frozen=True, kw_only=True)
class GpuError:
    """What went wrong with one of the worker's GPUs, as its sidecar read it from the node's exporter.

    There is one for each GPU, kind and XID; what comes again raises ``count`` and ``time``.
    """

    gpu: str  # UUID
    kind: str  # Xid, DoubleBitEcc, … (docs/reference/sidecar.md)
    xid: int | None = None
    count: int = 1
    cause: Cause | None = None  # as the sidecar judges the error
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
    accepted: AttemptId | None = None
    started: AttemptId | None = None
    world: World | None = None
    restored: Restored | None = None
    phase: str = ""
    message: str = ""
    committed_step: int | None = None
    committed_at: datetime | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    unsaved: Unsaved | None = None  # None: the last checkpoint on the volume did not fail
    highest_claim: Claim | None = None
    foreign_claims: tuple[Claim, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()
    loss: float | None = None
    throughput: float | None = None
    incidents: tuple[ReportedIncident, ...] = ()
    notices: tuple[Notice, ...] = ()
    gpu_errors: tuple[GpuError, ...] = ()
    preflight: Preflight | None = None  # None: nothing was asked of it
    lost_members: tuple[str, ...] = ()
    conflict: int = 0
    checkpointing: bool = False  # a rank of it is in a checkpoint
    exit: Exit | None = None
    books: TimeBreakdown = ()  # what its ranks' seconds went into, since the launcher's start
    unheard: int = 0  # entries of its lists beyond those that are heard

    def fresh(self, now: datetime) -> bool:
        """Young enough to speak about now."""
        return now - self.received_at <= c.REPORT_FRESH

    @property
    def highest_pair(self) -> AttemptId | None:
        """The highest world that it knows to have started."""
        pairs = [pair for pair in (self.started, self.world.pair if self.world else None) if pair]
        return max(pairs, default=None)


def parse_report(body: Json, received_at: datetime) -> Report | None:
    """``report.json``; None for a version that is not known here."""
    pod, launcher = part(body, "pod"), body.get("launcher")
    if body.get("version") != c.PROTOCOL_VERSION or not pod.get("uid"):
        return None
    notices = objects(body.get("notices"))[-c.MAX_NOTICES_TOLD :]
    base = Report(
        pod_uid=str(pod["uid"]),
        received_at=received_at,
        silent_seconds=values.real(body.get("launcherSilentSeconds")),
        notices=tuple(map(_notice, notices)),
        gpu_errors=tuple(filter(None, map(_gpu_error, objects(body.get("gpu"))[: c.MAX_GPU_ERRORS]))),
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
    ports = part(launcher, "ports")
    by_touch_file = objects(launcher.get("notices"))[-c.MAX_NOTICES_TOLD :]
    # A launcher knows only what its touch-file asked for; the sidecar, what the cloud said.
    seen = {notice.id: notice for notice in (*map(_notice, by_touch_file), *base.notices)}
    return Report(
        pod_uid=base.pod_uid,
        received_at=base.received_at,
        has_launcher=True,
        silent_seconds=base.silent_seconds,
        ready=launcher.get("ready") is True,
        store=integer(ports.get("store")) or c.PORT_STORE,
        control=integer(ports.get("control")) or c.PORT_CONTROL,
        accepted=values.pair(launcher.get("accepted")),
        started=values.pair(launcher.get("started")),
        world=_world(launcher.get("world")),
        restored=_restored(part(launcher, "restored")),
        phase=values.said(launcher.get("phase")),
        message=values.words(launcher.get("message")),
        committed_step=integer(launcher.get("committedStep")),
        committed_at=parse_time(launcher.get("committedAt")),
        checkpoints=_checkpoints(part(launcher, "checkpoints")),
        unsaved=_unsaved(part(part(launcher, "checkpointsFailing"), c.SHARED_TIER)),
        highest_claim=_claim(launcher.get("highestClaim")),
        foreign_claims=tuple(
            filter(None, map(_claim, values.of_pairs(launcher.get("foreignClaims"))[-c.MAX_CLAIMS_TOLD :]))
        ),
        quarantined=tuple(
            Quarantined(path=values.said(item["path"]), reason=values.words(item.get("reason")))
            for item in objects(launcher.get("quarantined"))[: c.QUARANTINED_KEPT]
            if values.said(item.get("path"))
        ),
        loss=values.real(launcher.get("loss")),
        throughput=values.real(launcher.get("throughput")),
        incidents=tuple(filter(None, map(_told, values.of_pairs(launcher.get("incidents"))[: c.MAX_INCIDENTS_TOLD]))),
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
    """Entries of its lists that are too many."""
    return sum(max(0, len(items(value.get(name))) - most) for name, most in _HEARD.items())


def _books(accounting: Json) -> TimeBreakdown:
    """Whole seconds by cause. What is booked under a cause that is not known here counts as attributed to none."""
    told = dict(part(accounting, "seconds"))
    known = [values.whole(told.pop(name, None)) for name in c.SPENT[:-1]]
    return short([*known, sum(map(values.whole, (*told.values(), accounting.get("unattributedSeconds"))))])


def _told(value: Json) -> ReportedIncident | None:
    pair = values.pair(value)
    if pair is None:
        return None
    return ReportedIncident(
        pair=pair,
        cause=cause_of(value.get("cause")) or Cause.INFRASTRUCTURE,
        action=values.said(value.get("action")),
        reason=values.said(value.get("reason")),
        message=values.words(value.get("message")),
        pod=values.text(value.get("pod")),
        rank=integer(value.get("rank")),
        exit_code=integer(value.get("exitCode")),
        node=values.text(value.get("node")),
        detected=parse_time(value.get("detectedTime")),
        resumed=parse_time(value.get("resumedTime")),
        lost_steps=integer(value.get("lostSteps")),
        restored_from=_origin(value.get("restoredFrom")),
        part_of=values.pair(value.get("partOf")),
    )


def _origin(value: Any) -> str | None:
    return (values.text(value) or "")[: c.MAX_ORIGIN] or None


def _restored(value: Json) -> Restored | None:
    step = integer(value.get("step"))
    return None if step is None else Restored(step=step, origin=_origin(value.get("from")))


def _checkpoints(tiers: Json) -> tuple[Checkpoint, ...]:
    found = []
    for tier, value in islice(tiers.items(), c.MAX_TIERS):
        pair = values.pair(value)
        time, step = (parse_time(value.get("time")), integer(value.get("step"))) if pair else (None, None)
        if pair is not None and time is not None and step is not None:
            found.append(Checkpoint(step=step, pair=pair, tier=values.name(tier), time=time))
    return tuple(found)


def _unsaved(value: Json) -> Unsaved | None:
    since = parse_time(value.get("since"))
    if since is None:
        return None
    return Unsaved(since=since, cause=values.said(value.get("cause")), message=values.words(value.get("message")))


def _claim(value: Any) -> Claim | None:
    pair = values.pair(value)
    if pair is None:
        return None
    return Claim(
        pair=pair,
        job_uid=values.said(value.get("jobUID")),
        publication=values.said(value.get("publication")),
        from_step=integer(value.get("fromStep")) or 0,
        from_pair=values.pair(value.get("fromPair")),
    )


def _world(value: Any) -> World | None:
    pair = values.pair(value)
    if pair is None:
        return None
    return World(
        pair=pair,
        publication=values.said(value.get("publication")),
        members=tuple(map(values.name, items(value.get("members"))[: c.MAX_WORKERS])),
        coordinator=values.said(value.get("coordinator")),
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


def _gpu_error(value: Json) -> GpuError | None:
    """None of what names neither a GPU nor a kind."""
    gpu, kind, xid = values.text(value.get("gpu")), values.text(value.get("kind")), integer(value.get("xid"))
    if not gpu or not kind:
        return None
    return GpuError(
        gpu=gpu[: c.MAX_NAME],
        kind=kind[: c.MAX_NAME],
        xid=xid if xid is not None and xid > 0 else None,
        count=max(integer(value.get("count")) or 1, 1),
        cause=cause_of(value.get("cause")),
        action=(values.text(value.get("action")) or "")[: c.MAX_NAME],
        message=values.words(value.get("message")),
        since=parse_time(value.get("firstTime")),
        time=parse_time(value.get("lastTime")),
    )


def _preflight(value: Any) -> Preflight | None:
    if not isinstance(value, Mapping):
        return None
    checks = objects(value.get("checks"))[: c.MAX_CHECKS]
    return Preflight(
        checks=tuple(
            Check(
                name=(values.text(check.get("name")) or "")[: c.MAX_NAME],
                result=(values.text(check.get("result")) or "")[: c.MAX_NAME],
                message=values.words(check.get("message")),
                unreached=tuple(map(values.name, items(check.get("unreached"))[: c.MAX_UNREACHED])),
                of_the_job=check.get("blame") == "Job",
            )
            for check in checks
        )
    )
