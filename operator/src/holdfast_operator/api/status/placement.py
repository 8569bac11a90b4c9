"""Nodes that are avoided, and the wait of a gang for its places."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from holdfast_operator.api.json import Json, integer, items, number
from holdfast_operator.api.reasons import FailureReason
from holdfast_operator.api.status.serialization import time_or_none
from holdfast_operator.api.times import format_time, parse_time


@dataclass(frozen=True, kw_only=True)
class AvoidedNode:
    """A node on which no new worker of this job is placed for now."""

    node: str
    reason: str
    until: datetime
    boot_id: str = ""
    message: str = ""
    failed_checks: tuple[str, ...] = ()  # of a preflight

    @property
    def required(self) -> bool:
        """Whether no new worker may go there; else one goes there only if no other node has capacity."""
        return self.reason != FailureReason.REBALANCE_RECOMMENDED

    def to_json(self) -> dict[str, Any]:
        until = format_time(self.until)
        entry = {"node": self.node, "reason": self.reason, "expirationTime": until, "bootID": self.boot_id}
        more = {"message": self.message, "failedChecks": list(self.failed_checks)}
        return {**entry, **{key: value for key, value in more.items() if value}}

    @classmethod
    def from_json(cls, value: Json) -> AvoidedNode:
        until = parse_time(value.get("expirationTime"))
        if until is None:
            raise ValueError("an avoided node without end")
        return cls(
            node=str(value["node"]),
            reason=str(value.get("reason") or ""),
            until=until,
            boot_id=str(value.get("bootID") or ""),
            message=str(value.get("message") or ""),
            failed_checks=tuple(map(str, items(value.get("failedChecks")))),
        )


@dataclass(frozen=True, kw_only=True)
class GangAttempt:
    """The wait for all workers to start together."""

    attempts: int = 0
    since: datetime | None = None
    lifted_at: datetime | None = None
    unpromised_since: datetime | None = None  # lifted; None while the scheduler makes room for all that have no node
    retry_at: datetime | None = None
    queued: bool = False  # a queue has not admitted all of them
    size: int | None = None  # fewer than all, where the job may begin with them

    def to_json(self) -> dict[str, Any]:
        return {
            "attempts": self.attempts,
            "waitStartTime": time_or_none(self.since),
            "liftedTime": time_or_none(self.lifted_at),
            "unpromisedTime": time_or_none(self.unpromised_since),
            "nextAttemptTime": time_or_none(self.retry_at),
            "size": self.size,
            "queued": True if self.queued else None,
        }

    @classmethod
    def from_json(cls, value: Json) -> GangAttempt:
        return cls(
            attempts=number(value.get("attempts")),
            since=parse_time(value.get("waitStartTime")),
            lifted_at=parse_time(value.get("liftedTime")),
            unpromised_since=parse_time(value.get("unpromisedTime")),
            retry_at=parse_time(value.get("nextAttemptTime")),
            size=integer(value.get("size")),
            queued=value.get("queued") is True,
        )
