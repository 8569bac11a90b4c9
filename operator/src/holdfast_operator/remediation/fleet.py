"""What a remediation pass sees: nodes, their pods, the alerts about them and the history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from holdfast_operator.api.node_mark import Mark
from holdfast_operator.remediation.alerts import Alert
from holdfast_operator.remediation.settings import RemediationSettings

_CONTROL_PLANE = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")


class StayReason(StrEnum):
    """Why a pod is still on a node that is drained."""

    EVICTABLE = "leaves"
    OPTED_OUT = "its job opted out of node remediation"
    UNMANAGED = "no controller would recreate it"


@dataclass(frozen=True, kw_only=True)
class NodePod:
    """A pod that the drain is about. ``patience``: so long its job gets it away by itself, with a checkpoint."""

    namespace: str
    name: str
    uid: str
    stay: StayReason = StayReason.EVICTABLE
    patience: timedelta = timedelta(0)
    deleted_at: datetime | None = None
    """When its grace period ends, if its deletion was asked for."""

    @property
    def deleting(self) -> bool:
        """Whether its deletion was asked for."""
        return self.deleted_at is not None

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node. ``pods`` are known of marked ones only; None: not read, which is not the same as none."""

    name: str
    uid: str
    version: str
    ready: bool = True
    unschedulable: bool = False
    created: datetime | None = None
    boot_id: str = ""
    gpus: int = 0
    provider_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    mark: Mark | None = None
    marked: bool = False
    pods: tuple[NodePod, ...] | None = None

    @property
    def away(self) -> bool:
        """It takes no pods, whoever brought that about."""
        return not self.ready or self.unschedulable

    @property
    def control_plane(self) -> bool:
        return any(label in self.labels for label in _CONTROL_PLANE)

    def selected(self, rules: RemediationSettings) -> bool:
        """Whether ``nodeSelector`` includes the node."""
        return all(self.labels.get(key) == value for key, value in rules.node_selector.items())


@dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """What outlives a mark, for rate and cool-down.

    Noted with the mark, since its node may be taken away at any time, and again when the mark is about to go.
    """

    node: str
    started: datetime
    ended: datetime
    uid: str = ""

    @property
    def only_begun(self) -> bool:
        """The mark was to be written, and lives if it was."""
        return self.ended == self.started


@dataclass(frozen=True, kw_only=True)
class FleetSnapshot:
    """All that one plan depends on, besides the time."""

    rules: RemediationSettings
    alerts: tuple[Alert, ...] = ()
    machines: tuple[Node, ...] = ()
    history: tuple[HistoryEntry, ...] = ()
    listens_since: datetime | None = None
    """When this process began to listen to Alertmanager."""
