"""Since when nodes' Leases stand as they do, by the operator's clock: the time in a Lease is another machine's."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from datetime import datetime

from holdfast_operator.seen import NodeView


class Renewals:
    """What was last seen of each Lease that was asked for. Thread-safe: at worst it counts from a later look."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[datetime, datetime]] = {}  # by node: its renewal, and when that was seen first

    def timed(self, node: NodeView, now: datetime) -> NodeView:
        """The node with the time since which its Lease has not changed, as far as that was looked at."""
        if node.lease_renewed is None:
            return node
        renewed, since = self._seen.get(node.name, (None, now))
        if renewed != node.lease_renewed:
            since = now
            self._seen[node.name] = node.lease_renewed, since
        return replace(node, lease_unchanged_since=since)

    def keep(self, nodes: Container[str]) -> None:
        """Forget all others."""
        self._seen = {node: seen for node, seen in list(self._seen.items()) if node in nodes}
