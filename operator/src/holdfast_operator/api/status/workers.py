"""Workers: each incarnation and its phase. Phases only advance, except that a lost worker may return."""

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
    """The phase of a worker."""

    WANTED = "Wanted"  # counts as one of the replicas
    LEAVING = "Leaving"  # asked to leave, still there; its replacement is requested
    LOST = "Lost"  # assumed to be gone, not proved gone
    ENDED = "Ended"  # proved gone


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker(JsonFields):
    """One incarnation of a worker. Its pod name is used once."""

    SPARSE = True

    incarnation: int
    batch: int
    phase: Phase = Phase.WANTED
    gated: bool = False
    avoid: tuple[str, ...] = ()
    last_resort: tuple[str, ...] = ()  # nodes for which it is used only if no other has capacity
    spare: bool = False  # created as a spare; the membership shows whether it has a rank since
    on_demand: bool = False  # it must stay off spot capacity
    domain: str = ""  # the value of the label by which the job is packed
    host: int | None = None  # the incarnation that hosts the store of its rendezvous, which may be its own
    pod_uid: str = stored("podUID", default="")
    node: str = ""
    boot_id: str = stored("bootID", default="")
    grace_seconds: int = 30
    since: datetime | None = None
    bound_at: datetime | None = stored("boundTime", default=None)
    ready_at: datetime | None = stored("readyTime", default=None)
    absent_since: datetime | None = stored("absentTime", default=None)
    # whether its pod was gone by the deadline of its deletion; it is not if the runtime hangs
    left_in_time: bool = False
    cause: Cause | None = None
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    final: bool = False
    traceback: bool = False  # its message has the script's traceback
    attempt_id: AttemptId | None = stored("pair", default=None)
    counted: bool = False
    ordered: bool = False  # the operator ordered it to leave: no incident
    # the part of its launcher's accounts that the job's sums include
    booked: TimeBreakdown = stored("booked", default=(), read=goodput.read)
    divergences: int = 0  # those of its launcher that the job's count includes
    symptoms: tuple[str, ...] = ()  # symptoms that were observed and handled

    @property
    def known(self) -> bool:
        """Whether its pod was seen. If such a pod vanishes, it is lost; otherwise it is still to be created."""
        return bool(self.pod_uid)

    @property
    def hosts(self) -> bool:
        """Whether it hosts the store for the rendezvous of workers without Holdfast's launcher."""
        return self.host == self.incarnation

    @property
    def removal(self) -> RecoveryAction | None:
        """The action that removed the worker, if a decision about a failure did."""
        decision = decision_reason(self.reason) if self.ordered else None
        return decision.action if decision is not None else None

    @property
    def left_alone(self) -> bool:
        """Whether it was neither ordered to leave nor failed for a known cause, so that its exit code counts."""
        return not self.ordered and not self.cause

    @property
    def done(self) -> bool:
        """Whether it exited with 0 by itself. A script may also exit with 0 after SIGTERM."""
        return self.left_alone and self.exit_code == 0
