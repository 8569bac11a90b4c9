"""What our pods take of each node, kept up with each change of a pod: nobody adds up ten thousand pods in a pass.

Invariant: a node's amounts are what its pods that have not ended ask for. The cache's lock guards it.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from holdfast_operator.capacity import keeps_away
from holdfast_operator.quantities import Amounts, add, requests
from holdfast_operator.seen import Tenant, Usage

Json = Mapping[str, Any]


class Occupancy:
    """Amounts by pod and by node."""

    def __init__(self) -> None:
        self._pods: dict[str, Usage] = {}
        self._nodes: dict[str, Amounts] = {}
        self._snapshot: tuple[Usage, ...] | None = None

    def put(self, uid: str, body: Json) -> None:
        """A pod is new or has changed."""
        before, after = self._pods.get(uid), usage_of(body)
        if before == after:
            return
        self.drop(uid)
        if after is not None:
            self._pods[uid] = after
            add(self._nodes.setdefault(after.node, {}), after.amounts)
            self._snapshot = None

    def drop(self, uid: str) -> None:
        """The pod takes nothing any more."""
        taken = self._pods.pop(uid, None)
        if taken is None:
            return
        left = self._nodes[taken.node]
        add(left, taken.amounts, -1)
        if left.get("pods", Decimal(0)) <= 0:
            del self._nodes[taken.node]
        self._snapshot = None

    def by_node(self) -> tuple[Usage, ...]:
        """One for each node with pods of ours."""
        if self._snapshot is None:
            tenants: dict[str, list[Tenant]] = {node: [] for node in self._nodes}
            for taken in self._pods.values():
                tenants[taken.node] += taken.tenants
            self._snapshot = tuple(
                Usage(node=node, amounts=dict(sums), tenants=tuple(tenants[node]))
                for node, sums in self._nodes.items()
            )
        return self._snapshot


def usage_of(body: Json) -> Usage | None:
    """What one pod takes; None while it has no node, and once it has ended."""
    spec, status = body.get("spec") or {}, body.get("status") or {}
    if not spec.get("nodeName") or status.get("phase") in ("Succeeded", "Failed"):
        return None
    meta = body.get("metadata") or {}
    tenant = Tenant(
        namespace=str(meta.get("namespace", "")), labels=meta.get("labels") or {}, keeps_away=keeps_away(spec)
    )
    return Usage(node=str(spec["nodeName"]), amounts=requests(spec), tenants=(tenant,))
