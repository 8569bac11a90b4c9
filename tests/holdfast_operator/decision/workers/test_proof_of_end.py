"""A worker is proved gone by its node's boot or end, never by silence."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from holdfast_operator.api.status import Phase, Worker
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.snapshot import Observed
from holdfast_operator.decision.workers import fencing
from holdfast_operator.views import NodeView

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
GOOD = NodeView(name="n", boot_id="b1", lease_renewed=NOW)
LOST = Worker(
    incarnation=0, batch=0, phase=Phase.LOST, pod_uid="u", node="n", boot_id="b1", grace_seconds=30, since=NOW
)


@pytest.mark.parametrize(
    ("worker", "node", "proved"),
    [
        (LOST, replace(GOOD, ready=False), False),
        (LOST, replace(GOOD, lease_renewed=NOW - timedelta(hours=9)), False),
        (LOST, None, True),
        (LOST, replace(GOOD, boot_id="b2"), True),
        (LOST, replace(GOOD, taints=(("node.kubernetes.io/out-of-service", "x", "NoExecute"),)), True),
        (replace(LOST, absent_since=NOW), GOOD, False),
        (replace(LOST, node="", absent_since=NOW), GOOD, True),
        (replace(LOST, node=""), GOOD, False),
    ],
)
def test_a_silent_node_proves_nothing(
    observed: Observed, worker: Worker, node: NodeView | None, proved: bool
) -> None:
    status = replace(observed.status, workers=(worker,), incarnations=1)
    seen = replace(observed, nodes=(node,) if node else (), status=status)
    draft = fencing.apply(PlanDraft(seen=seen, now=NOW + timedelta(minutes=9), status=status))
    assert (fencing.proved_gone(draft) == {"u"}) is proved
