"""Nodes that are avoided, and the wait of a gang for its places."""

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
    failed_checks: tuple[str, ...] = ()  # of a preflight

    @property
    def required(self) -> bool:
        """Whether no new worker may go there; else one goes there only if no other node has capacity."""
        return self.reason != FailureReason.REBALANCE_RECOMMENDED


@dataclass(frozen=True, kw_only=True)
class GangAttempt(JsonFields):
    """The wait for all workers to start together."""

    SPARSE = True

    attempts: int = 0
    since: datetime | None = stored("waitStartTime", default=None)
    lifted_at: datetime | None = stored("liftedTime", default=None)
    # lifted; None while the scheduler makes room for all that have no node
    unpromised_since: datetime | None = stored("unpromisedTime", default=None)
    retry_at: datetime | None = stored("nextAttemptTime", default=None)
    queued: bool = False  # a queue has not admitted all of them
    size: int | None = None  # fewer than all, where the job may begin with them

    @property
    def backoff(self) -> timedelta:
        """How long the gang waits after this attempt."""
        return min(c.GANG_BACKOFF_MAX, c.GANG_BACKOFF_INITIAL * float(2 ** min(self.attempts, 10)))
