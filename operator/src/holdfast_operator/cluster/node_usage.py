"""The usage of our pods on each node.

It is updated with each change of a pod, because a pass cannot sum ten thousand pods.

Invariant: a node's usage is the sum of the requests of its pods that have not ended. The cache's lock guards it.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_operator.api.json import Json
from holdfast_operator.api.quantities import Amounts, add, requests
from holdfast_operator.cluster.interning import Interner
from holdfast_operator.scheduling.capacity import keeps_away
from holdfast_operator.views import NodeUsage, PodAffinityInfo, priority_of

_amounts = Interner()


class Occupancy:
    """The usage of pods by node. Only changed nodes are summed again."""

    def __init__(self) -> None:
        self._pods: dict[str, NodeUsage] = {}
        self._nodes: dict[str, dict[str, NodeUsage]] = {}  # its pods, by node
        self._sums: dict[str, tuple[NodeUsage, ...]] = {}
        self._changed: set[str] = set()
        self._snapshot: tuple[NodeUsage, ...] = ()

    def put(self, uid: str, body: Json) -> None:
        """Add or update a pod."""
        before, after = self._pods.get(uid), usage_of(body)
        if before == after:
            return
        self.drop(uid)
        if after is not None:
            self._pods[uid] = after
            self._nodes.setdefault(after.node, {})[uid] = after
            self._changed.add(after.node)

    def drop(self, uid: str) -> None:
        """Remove a pod."""
        taken = self._pods.pop(uid, None)
        if taken is None:
            return
        del self._nodes[taken.node][uid]
        self._changed.add(taken.node)

    def by_node(self) -> tuple[NodeUsage, ...]:
        """Return one entry per node and priority of our pods there. Unchanged entries are the same objects."""
        if self._changed:
            for node in self._changed:
                self._add_up(node)
            self._changed.clear()
            self._snapshot = tuple(usage for sums in self._sums.values() for usage in sums)
        return self._snapshot

    def _add_up(self, node: str) -> None:
        pods = self._nodes.get(node)
        if not pods:
            self._nodes.pop(node, None)
            self._sums.pop(node, None)
            return
        alike: dict[int, list[NodeUsage]] = {}
        for taken in pods.values():
            alike.setdefault(taken.priority, []).append(taken)
        self._sums[node] = tuple(_sum(node, priority, alike[priority]) for priority in sorted(alike))


def _sum(node: str, priority: int, pods: Iterable[NodeUsage]) -> NodeUsage:
    amounts: Amounts = {}
    tenants: list[PodAffinityInfo] = []
    for taken in pods:
        add(amounts, taken.amounts)
        tenants += taken.tenants
    return NodeUsage(node=node, amounts=amounts, tenants=tuple(tenants), priority=priority)


def usage_of(body: Json) -> NodeUsage | None:
    """Return the usage of one pod; None without a node, and after its end."""
    spec, status = body.get("spec") or {}, body.get("status") or {}
    if not spec.get("nodeName") or status.get("phase") in ("Succeeded", "Failed"):
        return None
    meta = body.get("metadata") or {}
    tenant = PodAffinityInfo(
        namespace=str(meta.get("namespace", "")), labels=meta.get("labels") or {}, keeps_away=keeps_away(spec)
    )
    return NodeUsage(
        node=str(spec["nodeName"]),
        amounts=_amounts(requests(spec)),
        tenants=(tenant,),
        priority=priority_of(spec),
    )
