"""``remedy(sight, now) -> Plan``: decides about faulty nodes. Pure and total: the same input gives the same plan.

Invariants:

- No action without our mark on the node, and no mark on a node that others cordoned.
- No eviction of a pod whose job opted out, and no termination of a node with such a pod.
- Of the selectable nodes, at most ``max_unavailable`` are away because of the operator, and at most ``max_per_hour``
  are marked within an hour.

The mark is written before any other action on the node, so the next pass completes an interrupted one.

A vanished alert is not a resolved one, although Alertmanager reports both alike. A node whose GPU needs a reset is
therefore released only after a boot. No node is released that is not Ready or has lost GPUs since it was marked. A
new machine under an old name is another machine: alerts from before its creation do not apply to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from holdfast_operator.remediation.alerts import Alert
from holdfast_operator.remediation.fleet import FleetSnapshot, HistoryEntry
from holdfast_operator.remediation.marked_nodes import tend
from holdfast_operator.remediation.plan import HOUR, Plan, Planner
from holdfast_operator.remediation.unmarked_nodes import consider


def remedy(sight: FleetSnapshot, now: datetime) -> Plan:
    """Return the plan for all nodes."""
    # Computed once for all nodes, because thousands of nodes may have alerts at the same time.
    pool = frozenset(m.name for m in sight.machines if not m.control_plane and m.selected(sight.rules))
    desk = Planner(
        sight=sight,
        now=now,
        firing=_by_node(alert for alert in sight.alerts if alert.firing),
        resolved={
            node: {alert.fingerprint for alert in alerts}
            for node, alerts in _by_node(alert for alert in sight.alerts if not alert.firing).items()
        },
        history=_recent(sight, now),
        pool=pool,
        away={machine.name for machine in sight.machines if machine.name in pool and machine.away},
        lately=_lately(sight, now),
    )
    marked = [machine for machine in sight.machines if machine.mark is not None]
    for machine in sorted(marked, key=lambda machine: machine.name):
        tend(desk, machine)
    unmarked = [machine for machine in sight.machines if machine.mark is None and machine.name in desk.firing]
    for machine in sorted(unmarked, key=lambda machine: (desk.firing[machine.name][0].started, machine.name)):
        consider(desk, machine)
    return Plan(
        actions=tuple(desk.actions),
        decisions=tuple(desk.decisions),
        history=desk.history,
        requeue_after=desk.wake.total_seconds() if desk.wake is not None else None,
    )


def _by_node(alerts: Iterable[Alert]) -> dict[str, list[Alert]]:
    found: dict[str, list[Alert]] = {}
    for alert in sorted(alerts, key=lambda alert: (alert.started, alert.fingerprint)):
        found.setdefault(alert.node, []).append(alert)
    return found


def _recent(sight: FleetSnapshot, now: datetime) -> tuple[HistoryEntry, ...]:
    span = max(HOUR, sight.rules.cooldown)
    return tuple(entry for entry in sight.history if now - entry.ended < span)


def _lately(sight: FleetSnapshot, now: datetime) -> tuple[tuple[datetime, str], ...]:
    starts = {(entry.node, entry.started): entry.uid if entry.only_begun else "" for entry in _recent(sight, now)}
    starts |= {(machine.name, machine.mark.since): "" for machine in sight.machines if machine.mark is not None}
    return tuple(sorted((time, uid) for (_node, time), uid in starts.items() if now - time < HOUR))
