"""What a pass may do to the world outside the status. Each is idempotent and names the object it means by UID."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from holdfast_operator.api.reasons import Cause
from holdfast_operator.api.status import Status
from holdfast_operator.manifests.common import Manifest


@dataclass(frozen=True, kw_only=True)
class ApplyChildren:
    """NetworkPolicy, Service, ConfigMap and PodDisruptionBudget, server-side applied."""

    manifests: tuple[Manifest, ...] = field(hash=False)
    digest: str


@dataclass(frozen=True, kw_only=True)
class CreatePod:
    """A worker's pod. That it exists already is fine if it is ours."""

    name: str
    manifest: Manifest = field(hash=False)


@dataclass(frozen=True, kw_only=True)
class LiftGate:
    """Let the scheduler have the pod, on nodes with these labels only."""

    name: str
    uid: str
    node_labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class LabelPod:
    """Show the worker's index on its pod."""

    name: str
    uid: str
    index: str


@dataclass(frozen=True, kw_only=True)
class RestorePod:
    """Put back the labels and the owner by which a worker's pod is listed."""

    name: str
    uid: str
    marks: Manifest = field(hash=False)


@dataclass(frozen=True, kw_only=True)
class DeletePod:
    """Gracefully, and only this very pod."""

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
    """The job itself, and only this very one; its children go with it, its checkpoints stay."""

    uid: str
    why: str


Action = ApplyChildren | CreatePod | LiftGate | LabelPod | RestorePod | DeletePod | DeleteJob | Publish


@dataclass(frozen=True, kw_only=True)
class Event:
    """A line in ``kubectl describe``: the same words as in condition and log."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, kw_only=True)
class DecisionMetric:
    """What was decided about a failure, 'nothing' included: for the metrics."""

    cause: Cause
    action: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class RecoveryMetric:
    """Training went on after an incident: for the metrics."""

    cause: Cause
    seconds: float
    lost_steps: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Write ``status`` first; then, if that was accepted, do ``actions`` in order and tell ``events``."""

    status: Status
    actions: tuple[Action, ...]
    events: tuple[Event, ...]
    counted: tuple[str, ...]
    decided: tuple[DecisionMetric, ...]
    recovered: tuple[RecoveryMetric, ...]
    reason: str
    message: str
    requeue_after: float | None
    decided_at: datetime
