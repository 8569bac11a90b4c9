"""The complete input of one decision, except the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

from holdfast_operator.api.job import Job
from holdfast_operator.api.status import Status
from holdfast_operator.api.timings import DEFAULT_TIMINGS, Timings
from holdfast_operator.manifests.installation import Installation
from holdfast_operator.scheduling.gang_queue import GangQueue
from holdfast_operator.views.nodes import NodeView
from holdfast_operator.views.pods import PodView
from holdfast_operator.views.reports import Report
from holdfast_operator.views.usage import NodeUsage


@dataclass(frozen=True, kw_only=True)
class CreationError:
    """The API server's error at the last creation of a child."""

    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The complete input of one decision, except the time."""

    job: Job
    status: Status
    platform: Installation
    job_key: str = ""
    nonce: str = ""  # a new publication ID, used if a generation is published
    started_at: datetime | None = None  # when this operator started
    pods: tuple[PodView, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    reports: tuple[Report, ...] = ()
    line: GangQueue | None = None  # the waiting gangs; None: not known yet, or not needed for this job
    usage: tuple[NodeUsage, ...] = ()
    refusal: CreationError | None = None
    applied: str = ""  # digest of the children that this process applied last
    published: int = -1  # revision that this process published last
    timings: Timings = DEFAULT_TIMINGS
    jobs: int = 1  # number of jobs, including this one
    rendezvous_ip: str = ""  # of the Service of the c10d host; empty: not known yet

    @cached_property
    def _pods_by_uid(self) -> Mapping[str, PodView]:
        return {pod.uid: pod for pod in reversed(self.pods)}

    @cached_property
    def _nodes_by_name(self) -> Mapping[str, NodeView]:
        return {node.name: node for node in reversed(self.nodes)}

    @cached_property
    def _reports_by_uid(self) -> Mapping[str, Report]:
        return {report.pod_uid: report for report in reversed(self.reports)}

    def pod(self, uid: str) -> PodView | None:
        return self._pods_by_uid.get(uid) if uid else None

    def pod_named(self, name: str) -> PodView | None:
        """Return the existing pod with this name."""
        return next((pod for pod in self.pods if pod.name == name and not pod.absent), None)

    def node(self, name: str) -> NodeView | None:
        return self._nodes_by_name.get(name) if name else None

    def report(self, uid: str) -> Report | None:
        """Return the newest report of this pod."""
        return self._reports_by_uid.get(uid) if uid else None

    def silent_for(self, uid: str, now: datetime) -> timedelta:
        """Return how long this process has received no report of this pod, counted from its own start at most."""
        own = self.report(uid)
        waited = [time for time in (self.started_at, own.received_at if own else None) if time is not None]
        return now - max(waited) if waited else timedelta(0)

    def warmed_up(self, now: datetime) -> bool:
        """Return whether the operator has run long enough for missing reports to be meaningful."""
        return self.started_at is None or now - self.started_at >= self.timings.start_grace
