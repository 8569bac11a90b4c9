"""The input of a remediation pass: nodes, their pods, their alerts and the history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from holdfast_operator.api.node_mark import Mark
from holdfast_operator.api.timings import DEFAULT_TIMINGS, Timings
from holdfast_operator.remediation.alerts import Alert
from holdfast_operator.remediation.settings import RemediationSettings

_CONTROL_PLANE = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")


class StayReason(StrEnum):
    """The reason why a pod is still on a node that is drained."""

    EVICTABLE = "leaves"
    OPTED_OUT = "its job opted out of node remediation"
    UNMANAGED = "no controller would recreate it"


@dataclass(frozen=True, kw_only=True)
class NodePod:
    """A pod that must leave a drained node. For ``patience``, its job may move it on its own, with a checkpoint."""

    namespace: str
    name: str
    uid: str
    stay: StayReason = StayReason.EVICTABLE
    patience: timedelta = timedelta(0)
    deleted_at: datetime | None = None
    """The end of its grace period, if its deletion was requested."""

    @property
    def deleting(self) -> bool:
        """Whether its deletion was requested."""
        return self.deleted_at is not None

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node. ``pods`` is read for marked nodes only. None means not read, which differs from no pods."""

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
        """Whether the node takes no pods, for any reason."""
        return not self.ready or self.unschedulable

    @property
    def control_plane(self) -> bool:
        return any(label in self.labels for label in _CONTROL_PLANE)

    def selected(self, rules: RemediationSettings) -> bool:
        """Return whether ``nodeSelector`` includes the node."""
        return all(self.labels.get(key) == value for key, value in rules.node_selector.items())


@dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """The part of a mark that stays after it, for rate and cool-down.

    It is recorded with the mark, because the node may be removed at any time, and again before the mark is removed.
    """

    node: str
    started: datetime
    ended: datetime
    uid: str = ""

    @property
    def only_begun(self) -> bool:
        """Whether the mark was only planned. It exists if its write succeeded."""
        return self.ended == self.started


@dataclass(frozen=True, kw_only=True)
class FleetSnapshot:
    """The complete input of a plan, except the time."""

    rules: RemediationSettings
    timings: Timings = DEFAULT_TIMINGS
    alerts: tuple[Alert, ...] = ()
    machines: tuple[Node, ...] = ()
    history: tuple[HistoryEntry, ...] = ()
    listens_since: datetime | None = None
    """The time at which this process began to receive alerts."""
