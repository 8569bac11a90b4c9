"""The input of a decision about membership, and its possible results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from holdfast_operator.api.reasons import MembershipReason
from holdfast_operator.api.status import Member, Membership
from holdfast_operator.views import Report, World

NO_INDEX = 1 << 30
"""The index of a candidate whose pod has no label of an index."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A pod of the job that exists.

    ``member``: its place, with the index of its label. ``ready``: its launcher reported ready recently. ``leaving``:
    the pod has ended, is being deleted or drains. ``unplaced``: no node has capacity for it.
    """

    member: Member
    on_demand: bool = False
    ready: bool = False
    ended: bool = False
    leaving: bool = False
    unplaced: bool = False
    ready_at: datetime | None = None
    report: Report | None = None  # of a pod with a launcher

    @property
    def uid(self) -> str:
        return self.member.pod_uid

    @property
    def up(self) -> bool:
        """Return whether its launcher recently reported ready and the pod stays."""
        return self.ready and not self.leaving


@dataclass(frozen=True, kw_only=True)
class MembershipRules:
    """The job's requirements for a generation."""

    replicas: int
    min_replicas: int
    replica_step: int = 1
    may_shrink: bool = True
    first_wait: timedelta = timedelta(seconds=30)
    shrink_after: timedelta = timedelta(0)
    on_demand: int = 0

    def world_of(self, size: int) -> int:
        """Return how many of ``size`` workers train: whole replica steps. The others are on standby."""
        return size - size % self.replica_step


@dataclass(frozen=True, kw_only=True)
class MembershipInput:
    """The input of a decision.

    ``proved_gone``: pods that cannot run again, as the fence policy proves. ``publication``: a new random ID for the
    next generation. ``stalled_since``: when training stopped. ``names``: the name of a pod in messages, by its UID.
    """

    membership: Membership
    workers: tuple[Candidate, ...]
    proved_gone: frozenset[str]
    rules: MembershipRules
    publication: str
    job_uid: str
    stalled_since: datetime | None = None
    names: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def reports(self) -> tuple[Report, ...]:
        return tuple(worker.report for worker in self.workers if worker.report is not None)

    @property
    def running(self) -> World | None:
        """Return the newest world that a launcher reports as running."""
        worlds = [w.report.world for w in self.workers if w.up and w.report and w.report.world]
        return max(worlds, key=lambda world: world.attempt_id, default=None)


@dataclass(frozen=True)
class Due:
    """A generation is due; with the reason."""

    reason: MembershipReason
    message: str


@dataclass(frozen=True)
class Wait:
    """No generation is due; with the reason."""

    reason: MembershipReason
    message: str


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A membership to write to the status and then to serve: a new generation, or a record within the present one."""

    membership: Membership
    reason: MembershipReason
    message: str
