"""Nodes with alerts and without the operator's mark: whether to act on them."""

from __future__ import annotations

from datetime import timedelta

from holdfast_operator.api.node_mark import Mark, Mode, kept
from holdfast_operator.remediation.alerts import Alert
from holdfast_operator.remediation.fleet import Node
from holdfast_operator.remediation.plan import HOUR, POLL_DRAIN, POLL_MARKED, Planner, SetMark, alert_summary

POLL_HELD = timedelta(seconds=20)


def consider(desk: Planner, machine: Node) -> None:
    """Mark and cordon a node whose alerts ask for it, unless something keeps the operator from it."""
    told = desk.firing[machine.name]
    alerts = [alert for alert in told if machine.created is None or alert.started >= machine.created]
    if not alerts:
        words = "it began before this node was created, so it is about another machine of this name"
        desk.say(machine, "StaleAlert", f"{alert_summary(told)}: {words}; nothing is done unless it begins again")
        return
    mode = min(max(alert.mode for alert in alerts), desk.sight.rules.mode)
    why = alert_summary(alerts)
    if mode is Mode.OBSERVE:
        desk.say(machine, "NodeAlerted", f"{why}; nothing is done: the mode for it is Observe", warning=True)
        return
    held = _held(desk, machine, alerts)
    if held is not None:
        reason, words = held
        desk.say(machine, reason, f"{why}; {mode.word} is held back: {words}", warning=True)
        return
    desk.begun.add(machine.name)
    desk.away.add(machine.name)
    if desk.sight.rules.dry_run:
        desk.say(machine, "DryRun", f"{why}; would be done: {mode.word}", warning=True)
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
    desk.say(machine, "NodeCordoned", f"{why}; the node is cordoned, mode {mode.word}", warning=True)
    desk.requeue_in(POLL_DRAIN if mode >= Mode.DRAIN else POLL_MARKED)


def _held(desk: Planner, machine: Node, alerts: list[Alert]) -> tuple[str, str] | None:
    """What keeps a node from being acted on."""
    rules = desk.sight.rules
    if machine.marked:
        return "MarkUnreadable", "its mark cannot be read; remove the annotation holdfast.dev/remediation"
    if machine.control_plane:
        return "ControlPlane", "nodes of the control plane are never touched"
    if not machine.selected(rules):
        return "NotSelected", "nodeSelector leaves it out"
    if machine.unschedulable:
        return "CordonedByOthers", "somebody else cordoned it"
    released = (entry.ended for entry in desk.history if entry.node == machine.name and not entry.only_begun)
    last = max(released, default=None)
    # One that began before the release had not ended: Prometheus was away, and Alertmanager reported it as resolved.
    goes_on = last is not None and any(alert.started <= last for alert in alerts)
    if last is not None and not goes_on and desk.now - last < rules.cooldown:
        desk.requeue_in(last + rules.cooldown - desk.now)
        return "CoolingDown", "it was acted on a short while ago (cooldownSeconds)"
    return _broken(desk, machine, goes_on=goes_on)


def _broken(desk: Planner, machine: Node, *, goes_on: bool) -> tuple[str, str] | None:
    """The breaker: many sick nodes at once are more likely a sick alert."""
    rules = desk.sight.rules
    limit = rules.max_unavailable.of(len(desk.pool))
    if len(desk.away) + (machine.name not in desk.away) > limit:
        desk.requeue_in(POLL_HELD)
        words = f"with it more nodes would be away than maxUnavailable allows ({limit} of {len(desk.pool)})"
        return "BreakerOpen", words
    # Its own mark that could not be written is no other one.
    lately = [time for time, uid in desk.lately if not uid or uid != machine.uid]
    if not goes_on and len(lately) + len(desk.begun) >= rules.max_per_hour:
        desk.requeue_in(lately[0] + HOUR - desk.now if lately else HOUR)
        return "RateLimited", f"maxPerHour ({rules.max_per_hour}) is reached"
    return None
