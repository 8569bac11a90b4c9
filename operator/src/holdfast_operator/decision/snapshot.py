"""All that one decision depends on, besides the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING

from holdfast_operator.api import names as c
from holdfast_operator.api.job import Job, Json, Scheduling
from holdfast_operator.api.quantities import Amounts
from holdfast_operator.api.status import Status
from holdfast_operator.views.nodes import NodeView
from holdfast_operator.views.pods import PodView
from holdfast_operator.views.reports import Report

if TYPE_CHECKING:
    from holdfast_operator.scheduling.gang_queue import GangQueue


@dataclass(frozen=True, kw_only=True)
class CreationError:
    """The API server's answer to the last creation of a child."""

    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class GangPriority:
    """What the scheduler thinks of a gang's pods."""

    priority: int = 0
    preempts: bool = True


@dataclass(frozen=True, kw_only=True)
class WaitingGang:
    """A job whose gang waits, or whose lifted pods have no node yet."""

    key: str
    uid: str
    created: datetime
    since: datetime  # its gang waits
    lifted: bool
    pods: int
    pod_spec: Json = field(hash=False)
    least: int = 0  # with so many of them it may begin; 0: with all
    retry_at: datetime | None = None
    scheduling: Scheduling = field(default_factory=Scheduling)
    on_demand: int = 0  # of the pods
    domain: str = ""
    standing: GangPriority = field(default_factory=GangPriority)


@dataclass(frozen=True, kw_only=True)
class PodAffinityInfo:
    """A pod of ours on a node, as far as others keep away from it or it from them."""

    namespace: str
    labels: Json = field(default_factory=dict, hash=False)
    keeps_away: tuple[Json, ...] = field(default=(), hash=False)


@dataclass(frozen=True, kw_only=True)
class NodeUsage:
    """What pods of ours, of one priority, take of a node, and who they are to those that keep away from them."""

    node: str
    amounts: Amounts = field(hash=False)
    tenants: tuple[PodAffinityInfo, ...] = ()
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class Installation:
    """What this installation is: the same for all jobs."""

    sidecar_image: str
    agents_url: str
    ca_bundle: str
    sidecar_pull_policy: str = "IfNotPresent"
    sidecar_user: int | None = c.SIDECAR_UID
    """None: the platform chooses one."""
    sidecar_resources: str = c.SIDECAR_RESOURCES
    """JSON."""
    metadata_url: str = ""
    dcgm_url: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    network_policies: bool = True
    disruption_budgets: bool = True


@dataclass(frozen=True, kw_only=True)
class Observed:
    """All that one decision depends on, besides the time."""

    job: Job
    status: Status
    platform: Installation
    job_key: str = ""
    nonce: str = ""  # a fresh publication id, should one be needed
    started_at: datetime | None = None  # this operator's own start
    pods: tuple[PodView, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    reports: tuple[Report, ...] = ()
    line: GangQueue | None = None  # the gangs that wait; None: not known yet of this job, or of no matter to it
    usage: tuple[NodeUsage, ...] = ()
    refusal: CreationError | None = None
    applied: str = ""  # digest of the children that this process applied last
    published: int = -1  # revision that this process published last
    jobs: int = 1  # how many there are, this one included
    rendezvous_ip: str = ""  # of the Service that leads to the host of a c10d store; empty: not known yet

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
        """The pod of this UID."""
        return self._pods_by_uid.get(uid) if uid else None

    def pod_named(self, name: str) -> PodView | None:
        """The existing pod of this name."""
        return next((pod for pod in self.pods if pod.name == name and not pod.absent), None)

    def node(self, name: str) -> NodeView | None:
        """The node of this name."""
        return self._nodes_by_name.get(name) if name else None

    def report(self, uid: str) -> Report | None:
        """The newest report of this pod."""
        return self._reports_by_uid.get(uid) if uid else None

    def silent_for(self, uid: str, now: datetime) -> timedelta:
        """How long this process, which may have begun later, has waited for a word of this pod."""
        own = self.report(uid)
        waited = [time for time in (self.started_at, own.received_at if own else None) if time is not None]
        return now - max(waited) if waited else timedelta(0)

    def warmed_up(self, now: datetime) -> bool:
        """Whether missing reports mean anything yet."""
        return self.started_at is None or now - self.started_at >= c.START_GRACE
