"""A node, from the API's JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property

from holdfast_operator.api import names as c
from holdfast_operator.api.json import EMPTY, Json, part
from holdfast_operator.api.node_mark import Mark, mark_of
from holdfast_operator.api.quantities import Amounts, quantity
from holdfast_operator.api.times import parse_time
from holdfast_operator.views.renewals import Renewals


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """The part of a node on which workers depend."""

    name: str
    ready: bool = True
    unschedulable: bool = False
    taints: tuple[tuple[str, str, str], ...] = ()  # (key, value, effect)
    boot_id: str = ""
    mark: Mark | None = None  # remediation's
    labels: Json = field(default_factory=dict, hash=False)
    allocatable: Json = field(default_factory=dict, hash=False)
    lease_renewed: datetime | None = None
    lease_seconds: int = 40
    heartbeat: datetime | None = None  # of the condition Ready, by the node's clock
    renewals: Renewals | None = None  # set if it is uncertain whether the node is alive

    @cached_property
    def offers(self) -> Amounts:
        """Return the allocatable resources."""
        return {key: quantity(value) for key, value in self.allocatable.items()}

    def lease_stale(self, now: datetime) -> bool:
        """Return whether the kubelet has been silent for longer than its Lease."""
        return self.lease_renewed is not None and now - self.lease_renewed > timedelta(seconds=self.lease_seconds)

    def dead(self, now: datetime) -> bool:
        """Return whether the node has stopped reporting, which proves nothing about its processes."""
        return not self.ready or self.lease_stale(now) or self.out_of_service

    @property
    def out_of_service(self) -> bool:
        """Whether an administrator confirmed that the node is off."""
        return any(key == c.TAINT_OUT_OF_SERVICE for key, _, _ in self.taints)

    @property
    def tainted_silent(self) -> bool:
        """Whether the node does not report to the node controller, or did not a moment ago."""
        return any(key in (c.TAINT_NOT_READY, c.TAINT_UNREACHABLE) for key, _, _ in self.taints)

    @property
    def announced(self) -> str:
        """The taint which announces that the node will leave, or an empty string."""
        return next((key for key, _, _ in self.taints if key in c.TAINTS_LEAVING), "")


def parse_node(body: Json, lease: Json | None = None) -> NodeView:
    """Parse a node from the API's JSON, with its lease if it was read."""
    meta, spec, status = part(body, "metadata"), part(body, "spec"), part(body, "status")
    ready = next((item for item in status.get("conditions") or () if item.get("type") == "Ready"), EMPTY)
    lease_spec = part(lease or EMPTY, "spec")
    return NodeView(
        name=str(meta.get("name", "")),
        ready=ready.get("status") == "True",
        unschedulable=bool(spec.get("unschedulable")),
        taints=tuple(
            (str(taint.get("key", "")), str(taint.get("value") or ""), str(taint.get("effect", "")))
            for taint in spec.get("taints") or ()
        ),
        boot_id=str(part(status, "nodeInfo").get("bootID") or ""),
        mark=mark_of(body),
        labels=meta.get("labels") or {},
        allocatable=status.get("allocatable") or {},
        lease_renewed=parse_time(lease_spec.get("renewTime")),
        lease_seconds=int(lease_spec.get("leaseDurationSeconds") or 40),
        heartbeat=parse_time(ready.get("lastHeartbeatTime")),
    )
