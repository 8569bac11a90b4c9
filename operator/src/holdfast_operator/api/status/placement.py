"""Nodes that are avoided, and the wait of a gang for capacity."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from holdfast_operator.api import names as c
from holdfast_operator.api.reasons import FailureReason
from holdfast_operator.api.status.json_fields import JsonFields, stored


@dataclass(frozen=True, kw_only=True)
class AvoidedNode(JsonFields):
    """A node on which no new worker of this job is placed for now."""

    SPARSE = True

    node: str
    reason: str = stored("reason", missing="")
    until: datetime = stored("expirationTime")
    boot_id: str = stored("bootID", default="")
    message: str = ""
    failed_checks: tuple[str, ...] = ()  # preflight checks that failed

    @property
    def required(self) -> bool:
        """Whether no new worker may go there; otherwise it is used only if no other node has capacity."""
        return self.reason != FailureReason.REBALANCE_RECOMMENDED


@dataclass(frozen=True, kw_only=True)
class GangAttempt(JsonFields):
    """The wait for all workers to start together."""

    SPARSE = True

    attempts: int = 0
    since: datetime | None = stored("waitStartTime", default=None)
    lifted_at: datetime | None = stored("liftedTime", default=None)
    # after the gates were removed; None while the scheduler preempts pods for all unbound ones
    unpromised_since: datetime | None = stored("unpromisedTime", default=None)
    retry_at: datetime | None = stored("nextAttemptTime", default=None)
    queued: bool = False  # a queue has not admitted all of them
    size: int | None = None  # fewer than all, with which an elastic job starts

    @property
    def backoff(self) -> timedelta:
        """The wait after this attempt."""
        return min(c.GANG_BACKOFF_MAX, c.GANG_BACKOFF_INITIAL * float(2 ** min(self.attempts, 10)))
