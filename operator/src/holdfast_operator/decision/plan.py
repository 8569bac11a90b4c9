"""The actions of a pass on objects other than the status. Each is idempotent and identifies its object by UID."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from holdfast_operator.api.reasons import Cause
from holdfast_operator.api.status import Status
from holdfast_operator.manifests.common import Manifest
from holdfast_operator.views.reports import SlowRank


@dataclass(frozen=True, kw_only=True)
class ApplyChildren:
    """Apply NetworkPolicy, Service, ConfigMap and PodDisruptionBudget on the server side."""

    manifests: tuple[Manifest, ...] = field(hash=False)
    digest: str


@dataclass(frozen=True, kw_only=True)
class CreatePod:
    """Create a worker's pod. An existing pod of the job with this name counts as success."""

    name: str
    manifest: Manifest = field(hash=False)


@dataclass(frozen=True, kw_only=True)
class LiftGate:
    """Remove the scheduling gate of the pod, and restrict it to nodes with these labels."""

    name: str
    uid: str
    node_labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class LabelPod:
    """Set the worker's index as a label of its pod."""

    name: str
    uid: str
    index: str


@dataclass(frozen=True, kw_only=True)
class RestorePod:
    """Restore the labels and the owner by which a worker's pod is listed."""

    name: str
    uid: str
    marks: Manifest = field(hash=False)


@dataclass(frozen=True, kw_only=True)
class DeletePod:
    """Delete this pod gracefully, by UID."""

    name: str
    uid: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Publish:
    """Serve this membership to the job's pods."""

    revision: int
    document: Manifest = field(hash=False)


@dataclass(frozen=True, kw_only=True)
class DeleteJob:
    """Delete this job, by UID. Kubernetes deletes its children; its checkpoints stay."""

    uid: str
    why: str


Action = ApplyChildren | CreatePod | LiftGate | LabelPod | RestorePod | DeletePod | DeleteJob | Publish


@dataclass(frozen=True, kw_only=True)
class Event:
    """A Kubernetes event, with the same text as condition and log."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, kw_only=True)
class DecisionMetric:
    """A decision about a failure, for the metrics. It may be to do nothing."""

    cause: Cause
    action: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class RecoveryMetric:
    """The end of an incident, for the metrics: training resumed."""

    cause: Cause
    seconds: float
    lost_steps: int


@dataclass(frozen=True, kw_only=True)
class DivergenceMetric:
    """The ranks that a launcher newly reports as different from other replicas, for the metrics."""

    ranks: int
    repaired: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of a pass. Write ``status``; if that succeeds, perform ``actions`` in order and write ``events``."""

    status: Status
    actions: tuple[Action, ...]
    events: tuple[Event, ...]
    counted: tuple[str, ...]
    decided: tuple[DecisionMetric, ...]
    recovered: tuple[RecoveryMetric, ...]
    diverged: tuple[DivergenceMetric, ...]
    slow_ranks: tuple[SlowRank, ...]
    reason: str
    message: str
    requeue_after: float | None
    decided_at: datetime
