"""Decides about nodes with alerts and without the operator's mark."""

from __future__ import annotations

from datetime import timedelta

from holdfast_operator.api.node_mark import Mark, Mode, kept
from holdfast_operator.api.reasons import NodeReason
from holdfast_operator.decision.reporting import messages
from holdfast_operator.remediation.alerts import Alert
from holdfast_operator.remediation.fleet import Node
from holdfast_operator.remediation.plan import HOUR, Planner, SetMark, alert_summary

POLL_HELD = timedelta(seconds=20)


def consider(desk: Planner, machine: Node) -> None:
    """Mark and cordon a node whose alerts require it, unless an obstacle exists."""
    told = desk.firing[machine.name]
    alerts = [alert for alert in told if machine.created is None or alert.started >= machine.created]
    if not alerts:
        desk.say(machine, NodeReason.STALE_ALERT, messages.nodes.alert_before_node(alert_summary(told)))
        return
    mode = min(max(alert.mode for alert in alerts), desk.sight.rules.mode)
    why = alert_summary(alerts)
    if mode is Mode.OBSERVE:
        desk.say(machine, NodeReason.NODE_ALERTED, messages.nodes.only_observed(why), warning=True)
        return
    held = _held(desk, machine, alerts)
    if held is not None:
        reason, words = held
        desk.say(machine, reason, messages.nodes.blocked(why, mode.word, words), warning=True)
        return
    desk.begun.add(machine.name)
    desk.away.add(machine.name)
    if desk.sight.rules.dry_run:
        desk.say(machine, NodeReason.DRY_RUN, messages.nodes.dry_run(why, mode.word), warning=True)
        return
    mark = Mark(
        mode=mode,
        message=why,
        since=desk.now,
        alerts=kept(alert.fingerprint for alert in alerts),
        draining_since=desk.now if mode >= Mode.DRAIN else None,
        until_reboot=any(alert.until_reboot for alert in alerts),
        boot_id=machine.boot_id,
        gpus=machine.gpus,
    )
    desk.actions.append(SetMark(machine=machine, mark=mark, cordon=True))
    desk.note(machine, mark)
    desk.say(machine, NodeReason.NODE_CORDONED, messages.nodes.cordoned(why, mode.word), warning=True)
    desk.requeue_in(desk.sight.timings.drain_poll if mode >= Mode.DRAIN else desk.sight.timings.marked_poll)


def _held(desk: Planner, machine: Node, alerts: list[Alert]) -> tuple[NodeReason, str] | None:
    """Return the obstacle to an action on a node."""
    rules = desk.sight.rules
    if machine.marked:
        return NodeReason.MARK_UNREADABLE, messages.nodes.mark_unreadable()
    if machine.control_plane:
        return NodeReason.CONTROL_PLANE, messages.nodes.control_plane()
    if not machine.selected(rules):
        return NodeReason.NOT_SELECTED, messages.nodes.not_selected()
    if machine.unschedulable:
        return NodeReason.CORDONED_BY_OTHERS, messages.nodes.cordoned_by_others()
    released = (entry.ended for entry in desk.history if entry.node == machine.name and not entry.only_begun)
    last = max(released, default=None)
    # An alert that began before the release had not ended: Prometheus was away, and Alertmanager reported it as
    # resolved.
    goes_on = last is not None and any(alert.started <= last for alert in alerts)
    if last is not None and not goes_on and desk.now - last < rules.cooldown:
        desk.requeue_in(last + rules.cooldown - desk.now)
        return NodeReason.COOLING_DOWN, messages.nodes.cooling_down()
    return _broken(desk, machine, goes_on=goes_on)


def _broken(desk: Planner, machine: Node, *, goes_on: bool) -> tuple[NodeReason, str] | None:
    """Return the state of the circuit breaker: many faulty nodes at once are more likely caused by a faulty alert."""
    rules = desk.sight.rules
    limit = rules.max_unavailable.of(len(desk.pool))
    if len(desk.away) + (machine.name not in desk.away) > limit:
        desk.requeue_in(POLL_HELD)
        return NodeReason.BREAKER_OPEN, messages.nodes.max_unavailable(limit, len(desk.pool))
    # A planned mark of this node that could not be written does not count as another one.
    lately = [time for time, uid in desk.lately if not uid or uid != machine.uid]
    if not goes_on and len(lately) + len(desk.begun) >= rules.max_per_hour:
        desk.requeue_in(lately[0] + HOUR - desk.now if lately else HOUR)
        return NodeReason.RATE_LIMITED, messages.nodes.max_per_hour(rules.max_per_hour)
    return None
