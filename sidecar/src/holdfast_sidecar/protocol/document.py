"""The sidecar's side of `docs/reference/protocol.md`: what it reads and writes, without any I/O."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from holdfast_sidecar.constants import VERSION
from holdfast_sidecar.errors import MalformedError, UnknownVersionError

Document = dict[str, Any]

INTERRUPTIONS = frozenset({"terminate", "stop", "hibernate", "preempt", "redeploy", "reboot"})
"""Actions after which the pod is gone: it drains. Any other action asks for a checkpoint only."""

RUNNING = "Running"
BLAME_JOB = "Job"
PASSED = "Passed"
FAILED = "Failed"
SKIPPED = "Skipped"

SIGNIFICANT = (
    "ready",
    "accepted",
    "started",
    "world",
    "phase",
    "checkpoints",
    "highestClaim",
    "foreignClaims",
    "conflict",
    "quarantined",
    "incidents",
    "notices",
    "lostMembers",
    "exit",
)
"""Fields of `status.json` whose change is reported at once."""


def format_time(when: datetime) -> str:
    """RFC 3339 in UTC with microseconds and a trailing Z."""
    return when.astimezone(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def parse_time(text: str) -> datetime:
    """The reverse of `format_time`; any precision is read, a time without a zone is refused."""
    try:
        when = datetime.fromisoformat(text)
        if when.tzinfo is None:
            raise MalformedError(f"{text[:40]!r} has no time zone")
        return when.astimezone(UTC)
    except (ValueError, OverflowError) as error:  # the latter: beyond the years 1 to 9999 of UTC
        raise MalformedError(f"{text[:40]!r} is not a time") from error


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def parse_document(data: bytes, name: str) -> Document:
    """A JSON object of the known version. NaN and infinities, which JSON has not, become null."""
    try:
        document = json.loads(data, parse_constant=lambda _: None, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{name} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise MalformedError(f"{name} is not a JSON object")
    version = document.get("version")
    if version != VERSION or isinstance(version, bool):
        raise UnknownVersionError(f"{name} has version {version!r}; this sidecar understands {VERSION}")
    return document


def dump_document(document: Mapping[str, Any]) -> bytes:
    """Compact JSON."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def membership_revision(data: bytes) -> int:
    """The revision of a membership document; refuses what the launcher could not use."""
    document = parse_document(data, "membership")
    revision = document.get("revision")
    if not isinstance(revision, int) or isinstance(revision, bool) or revision < 0:
        raise MalformedError(f"membership has revision {revision!r}")
    if not isinstance(document.get("generation"), int) or not isinstance(document.get("members"), list):
        raise MalformedError("membership has no generation or no members")
    return revision


def significant(status: Document | None) -> bytes:
    """What makes two statuses differ enough for a report at once."""
    if status is None:
        return b""
    return json.dumps([status.get(field) for field in SIGNIFICANT], sort_keys=True).encode()


@dataclass(frozen=True, kw_only=True)
class Notice:
    """What a source says will happen to this pod's machine."""

    id: str
    reason: str
    source: str
    action: str
    deadline: datetime
    """When the machine goes; of a notice that names no time, when the checkpoint is wanted."""
    observed_at: datetime

    @property
    def drain(self) -> bool:
        """True when the pod must leave, not only save."""
        return self.action in INTERRUPTIONS

    def as_report(self) -> Document:
        """One entry of `report.notices`."""
        return {
            "id": self.id,
            "reason": self.reason,
            "source": self.source,
            "action": self.action,
            "deadline": format_time(self.deadline),
            "observedAt": format_time(self.observed_at),
        }

    def as_request(self) -> Document:
        """The content of `emergency_checkpoint`."""
        return {
            "version": VERSION,
            "id": self.id,
            "reason": self.reason,
            "source": self.source,
            "deadline": format_time(self.deadline),
            "requestedAt": format_time(self.observed_at),
            "drain": self.drain,
        }

    @staticmethod
    def from_report(entry: Mapping[str, Any]) -> "Notice":
        """The reverse of `as_report`."""
        try:
            return Notice(
                id=str(entry["id"]),
                reason=str(entry["reason"]),
                source=str(entry["source"]),
                action=str(entry["action"]),
                deadline=parse_time(str(entry["deadline"])),
                observed_at=parse_time(str(entry["observedAt"])),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise MalformedError(f"a notice lacks {error}") from error


@dataclass(frozen=True, kw_only=True)
class GpuError:
    """What went wrong with one of this pod's GPUs: one for each GPU, kind and XID, however often it came."""

    gpu: str
    """Its UUID."""
    index: int | None
    """Its number on the node, as the exporter counts."""
    kind: str
    xid: int | None
    count: int
    cause: str
    action: str
    message: str
    first: datetime
    last: datetime

    def as_report(self) -> Document:
        """One entry of `report.gpu`."""
        return {
            "gpu": self.gpu,
            "index": self.index,
            "kind": self.kind,
            "xid": self.xid,
            "count": self.count,
            "cause": self.cause,
            "action": self.action,
            "message": self.message,
            "firstTime": format_time(self.first),
            "lastTime": format_time(self.last),
        }

    @staticmethod
    def from_report(entry: Mapping[str, Any]) -> "GpuError":
        """The reverse of `as_report`."""
        try:
            return GpuError(
                gpu=str(entry["gpu"]),
                index=None if entry["index"] is None else int(entry["index"]),
                kind=str(entry["kind"]),
                xid=None if entry["xid"] is None else int(entry["xid"]),
                count=int(entry["count"]),
                cause=str(entry["cause"]),
                action=str(entry["action"]),
                message=str(entry["message"]),
                first=parse_time(str(entry["firstTime"])),
                last=parse_time(str(entry["lastTime"])),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MalformedError(f"a GPU error lacks {error}") from error


@dataclass(frozen=True, kw_only=True)
class Check:
    """How one check of a preflight stands."""

    name: str
    result: str
    """`Running`, `Passed`, `Failed` or `Skipped`."""
    message: str
    unreached: tuple[str, ...] = ()
    """UIDs of the pods that `Network` does not reach."""
    blame: str = ""
    """`Job` if it failed by what the job says, whatever the node."""

    def as_report(self) -> Document:
        """One entry of `report.preflight.checks`."""
        entry: Document = {"name": self.name, "result": self.result, "message": self.message}
        if self.unreached:
            entry["unreached"] = list(self.unreached)
        if self.blame:
            entry["blame"] = self.blame
        return entry


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """How all of them stand."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """None runs or has failed."""
        return all(check.result in (PASSED, SKIPPED) for check in self.checks)

    def as_report(self) -> Document:
        """`report.preflight`."""
        return {"checks": [check.as_report() for check in self.checks]}

    @staticmethod
    def from_report(value: Mapping[str, Any]) -> "Preflight":
        """The reverse of `as_report`."""
        try:
            checks = [
                Check(
                    name=str(one["name"]),
                    result=str(one["result"]),
                    message=str(one["message"]),
                    unreached=tuple(map(str, one.get("unreached", ()))),
                    blame=str(one.get("blame", "")),
                )
                for one in value["checks"]
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise MalformedError(f"a preflight lacks {error}") from error
        return Preflight(checks=tuple(checks))


@dataclass(frozen=True, kw_only=True)
class Pod:
    """The pod that this sidecar belongs to."""

    namespace: str
    name: str
    uid: str
    node: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """One report to the operator. It carries the whole state, so a lost one is made good by the next."""

    start_id: str
    number: int
    pod: Pod
    launcher: Document | None
    launcher_silent_seconds: float
    notices: Sequence[Notice]
    gpu: Sequence[GpuError] = ()
    preflight: Preflight | None = None

    def encode(self) -> bytes:
        """The body of `POST /v1/report`."""
        return dump_document(
            {
                "version": VERSION,
                "sidecar": {"startId": self.start_id, "number": self.number},
                "pod": {
                    "namespace": self.pod.namespace,
                    "name": self.pod.name,
                    "uid": self.pod.uid,
                    "node": self.pod.node,
                },
                "launcher": self.launcher,
                "launcherSilentSeconds": round(self.launcher_silent_seconds, 3),
                "notices": [notice.as_report() for notice in self.notices],
                "gpu": [error.as_report() for error in self.gpu],
                "preflight": None if self.preflight is None else self.preflight.as_report(),
            }
        )


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another worker of the job, whose launcher listens there."""

    pod: str
    uid: str
    ip: str
    port: int


def answered_peers(data: bytes) -> tuple[Peer, ...] | None:
    """Whom the answer to a report names as peers; None if it says nothing of them."""
    peers = parse_document(data, "the report's answer").get("peers")
    if not isinstance(peers, list):
        return None
    try:
        found = [
            Peer(pod=str(one["pod"]), uid=str(one["podUID"]), ip=str(one["ip"]), port=int(one["port"]))
            for one in peers
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedError(f"a peer lacks {error}") from error
    return tuple(found)


def report_answer(data: bytes) -> int:
    """The membership's revision from the answer to a report; 0 while there is none."""
    revision = parse_document(data, "the report's answer").get("revision")
    if not isinstance(revision, int) or isinstance(revision, bool) or revision < 0:
        raise MalformedError(f"the report's answer has revision {revision!r}")
    return revision
