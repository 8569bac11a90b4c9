"""Nodes on which no new worker is placed for now."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from holdfast_operator.api.status import AvoidedNode
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures import avoided_nodes
from holdfast_operator.decision.snapshot import Observed
from holdfast_operator.views import NodeView

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
GOOD = NodeView(name="n", boot_id="b1", lease_renewed=NOW)


def test_avoided_nodes_are_forgotten_when_gone_alive_or_in_time(observed: Observed) -> None:
    def entry(node: str, reason: str, minutes: int = 5) -> AvoidedNode:
        return AvoidedNode(node=node, reason=reason, until=NOW + timedelta(minutes=minutes))

    nodes = (replace(GOOD, name="alive"), replace(GOOD, name="dead", ready=False), replace(GOOD, name="noticed"))
    entries = (
        entry("alive", "NodeLost"),
        entry("dead", "NodeLost"),
        entry("gone", "AWSNotice"),
        entry("noticed", "AWSNotice"),
    )
    status = replace(observed.status, avoided=entries)
    draft = PlanDraft(seen=replace(observed, nodes=nodes), now=NOW, status=status)
    assert [item.node for item in avoided_nodes.apply(draft).status.avoided] == ["dead", "noticed"]
    later = replace(draft, now=NOW + timedelta(minutes=6))
    assert avoided_nodes.apply(later).status.avoided == ()
