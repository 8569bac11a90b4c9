"""Workers: each incarnation, and where it is on its one-way street."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from holdfast_operator.api.ids import AttemptId, parse_pair
from holdfast_operator.api.json import Json, integer, items
from holdfast_operator.api.reasons import Cause, RecoveryAction, cause_of, decision_reason
from holdfast_operator.api.status import goodput
from holdfast_operator.api.status.goodput import TimeBreakdown
from holdfast_operator.api.status.serialization import time_or_none
from holdfast_operator.api.times import parse_time


class Phase(StrEnum):
    """Where a worker is on its one-way street."""

    WANTED = "Wanted"  # counts as one of the replicas
    LEAVING = "Leaving"  # still there, asked to go; its replacement is asked for
    LOST = "Lost"  # taken for dead, not proved gone
    ENDED = "Ended"  # proved gone


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One incarnation: a pod name that is used once."""

    incarnation: int
    batch: int
    phase: Phase = Phase.WANTED
    gated: bool = False
    avoid: tuple[str, ...] = ()
    last_resort: tuple[str, ...] = ()  # nodes that it takes only if no other has capacity
    spare: bool = False  # made to stand by; that it has a rank since, the membership tells
    on_demand: bool = False  # it stays off spot capacity
    domain: str = ""  # the value of the label by which the job is packed
    host: int | None = None  # the incarnation that hosts the store of its rendezvous, maybe its own
    pod_uid: str = ""
    node: str = ""
    boot_id: str = ""
    grace_seconds: int = 30
    since: datetime | None = None
    bound_at: datetime | None = None
    ready_at: datetime | None = None
    absent_since: datetime | None = None
    left_in_time: bool = (
        False  # its pod did not outlive the deadline of its deletion, as it does if its runtime hangs
    )
    cause: Cause | None = None
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    final: bool = False
    traceback: bool = False  # its message has the script's
    pair: AttemptId | None = None
    counted: bool = False
    ordered: bool = False  # it goes because we say so: no incident
    booked: TimeBreakdown = ()  # of its launcher's books, what stands in the job's
    symptoms: tuple[str, ...] = ()  # what was seen of it while it ran, and has been answered

    @property
    def known(self) -> bool:
        """Whether its pod was seen: a pod that vanished is then lost, not waiting to be created."""
        return bool(self.pod_uid)

    @property
    def hosts(self) -> bool:
        """Whether it hosts the store by which workers without Holdfast's launcher find each other."""
        return self.host == self.incarnation

    @property
    def removal(self) -> RecoveryAction | None:
        """The action that removed the worker, if a decision about a failure did."""
        decision = decision_reason(self.reason) if self.ordered else None
        return decision.action if decision is not None else None

    @property
    def left_alone(self) -> bool:
        """Nobody sent it away and nothing befell it, so how it ends is its own word."""
        return not self.ordered and not self.cause

    @property
    def done(self) -> bool:
        """It ended well, and by itself: a script may end with 0 on SIGTERM too."""
        return self.left_alone and self.exit_code == 0

    def to_json(self) -> dict[str, Any]:
        """Sparse: what has its default value is left out."""
        return _sparse(
            {
                "incarnation": self.incarnation,
                "batch": self.batch,
                "phase": str(self.phase),
                "gated": self.gated,
                "avoid": list(self.avoid),
                "lastResort": list(self.last_resort),
                "spare": self.spare,
                "onDemand": self.on_demand,
                "domain": self.domain,
                "host": self.host,
                "podUID": self.pod_uid,
                "node": self.node,
                "bootID": self.boot_id,
                "graceSeconds": self.grace_seconds,
                "since": time_or_none(self.since),
                "boundTime": time_or_none(self.bound_at),
                "readyTime": time_or_none(self.ready_at),
                "absentTime": time_or_none(self.absent_since),
                "leftInTime": self.left_in_time,
                "cause": self.cause,
                "reason": self.reason,
                "message": self.message,
                "exitCode": self.exit_code,
                "final": self.final,
                "traceback": self.traceback,
                "pair": self.pair.to_json() if self.pair else None,
                "counted": self.counted,
                "ordered": self.ordered,
                "booked": list(self.booked),
                "symptoms": list(self.symptoms),
            }
        )

    @classmethod
    def from_json(cls, value: Json) -> Worker:
        return cls(
            incarnation=int(value["incarnation"]),
            batch=int(value.get("batch", value["incarnation"])),
            phase=Phase(value.get("phase", Phase.WANTED)),
            gated=bool(value.get("gated", False)),
            avoid=tuple(map(str, items(value.get("avoid")))),
            last_resort=tuple(map(str, items(value.get("lastResort")))),
            spare=bool(value.get("spare", False)),
            on_demand=bool(value.get("onDemand", False)),
            domain=str(value.get("domain") or ""),
            host=integer(value.get("host")),
            pod_uid=str(value.get("podUID") or ""),
            node=str(value.get("node") or ""),
            boot_id=str(value.get("bootID") or ""),
            grace_seconds=int(value.get("graceSeconds", 30)),
            since=parse_time(value.get("since")),
            bound_at=parse_time(value.get("boundTime")),
            ready_at=parse_time(value.get("readyTime")),
            absent_since=parse_time(value.get("absentTime")),
            left_in_time=bool(value.get("leftInTime", False)),
            cause=cause_of(value.get("cause")),
            reason=str(value.get("reason") or ""),
            message=str(value.get("message") or ""),
            exit_code=integer(value.get("exitCode")),
            final=bool(value.get("final", False)),
            traceback=bool(value.get("traceback", False)),
            pair=parse_pair(value.get("pair")),
            counted=bool(value.get("counted", False)),
            ordered=bool(value.get("ordered", False)),
            booked=goodput.read(value.get("booked")),
            symptoms=tuple(map(str, items(value.get("symptoms")))),
        )


def _sparse(value: dict[str, Any]) -> dict[str, Any]:
    keep = ("incarnation", "batch", "phase", "host", "exitCode", "graceSeconds")
    return {key: item for key, item in value.items() if item or (key in keep and item is not None)}
