"""Workers: each incarnation, and where it is on its one-way street."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.reasons import Cause, RecoveryAction, decision_reason
from holdfast_operator.api.status import goodput
from holdfast_operator.api.status.goodput import TimeBreakdown
from holdfast_operator.api.status.json_fields import JsonFields, stored


class Phase(StrEnum):
    """Where a worker is on its one-way street."""

    WANTED = "Wanted"  # counts as one of the replicas
    LEAVING = "Leaving"  # still there, asked to go; its replacement is asked for
    LOST = "Lost"  # taken for dead, not proved gone
    ENDED = "Ended"  # proved gone


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker(JsonFields):
    """One incarnation: a pod name that is used once."""

    SPARSE = True

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
    pod_uid: str = stored("podUID", default="")
    node: str = ""
    boot_id: str = stored("bootID", default="")
    grace_seconds: int = 30
    since: datetime | None = None
    bound_at: datetime | None = stored("boundTime", default=None)
    ready_at: datetime | None = stored("readyTime", default=None)
    absent_since: datetime | None = stored("absentTime", default=None)
    # its pod did not outlive the deadline of its deletion, as it does if its runtime hangs
    left_in_time: bool = False
    cause: Cause | None = None
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    final: bool = False
    traceback: bool = False  # its message has the script's
    pair: AttemptId | None = None
    counted: bool = False
    ordered: bool = False  # it goes because we say so: no incident
    # of its launcher's books, what stands in the job's
    booked: TimeBreakdown = stored("booked", default=(), read=goodput.read)
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
