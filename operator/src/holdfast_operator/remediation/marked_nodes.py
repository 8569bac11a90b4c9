"""Nodes with the operator's mark: drained, replaced, and released."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from holdfast_operator.api.node_mark import Mark, Mode, kept
from holdfast_operator.api.reasons import NodeReason
from holdfast_operator.decision.reporting import messages
from holdfast_operator.remediation.fleet import Node, NodePod, StayReason
from holdfast_operator.remediation.plan import (
    HOUR,
    Evict,
    Planner,
    Release,
    SetMark,
    Terminate,
    alert_summary,
    listed,
)

POLL_CLOUD = timedelta(seconds=30)
# Three of Alertmanager's default repeat_interval. Of a silenced alert it sends nothing, not even its end.
UNHEARD = timedelta(hours=12)
# In addition to a pod's own grace period, for a slow kubelet.
_OVERDUE = timedelta(seconds=30)


def tend(desk: Planner, machine: Node) -> None:
    """Update a mark, then drain, replace or release its node."""
    rules, before = desk.sight.rules, machine.mark
    if before is None or rules.dry_run or rules.mode is Mode.OBSERVE:
        desk.say(machine, NodeReason.STALE_REMEDIATION_MARK, messages.nodes.stale_mark(), warning=True)
        return
    mark = _brought_up_to_date(desk, machine, before)
    if _released(desk, machine, mark):
        return
    if mark != before:
        desk.actions.append(SetMark(machine=machine, mark=mark))
    desk.requeue_in(desk.sight.timings.marked_poll)
    if mark.terminating_since is not None:
        desk.say(machine, NodeReason.NODE_REPLACED, messages.nodes.replacing(mark.message), warning=True)
        if _left(desk, machine, mark) == ():
            desk.actions.append(Terminate(machine=machine))
        desk.requeue_in(POLL_CLOUD)
    elif mark.overruled:
        desk.say(machine, NodeReason.UNCORDONED_EXTERNALLY, messages.nodes.uncordoned_externally(mark.message))
    elif mark.clear_since is not None:
        _say_clear(desk, machine, mark)
    elif _unheard(desk, machine, mark):
        hours = int(UNHEARD / HOUR)
        message = messages.nodes.alert_unheard(mark.message, hours, machine.name)
        desk.say(machine, NodeReason.ALERT_UNHEARD, message, warning=True)
    elif min(mark.mode, rules.mode) >= Mode.DRAIN:
        _drain(desk, machine, mark)
    else:
        desk.say(
            machine, NodeReason.NODE_CORDONED, messages.nodes.cordoned(mark.message, mark.mode.word), warning=True
        )


def _brought_up_to_date(desk: Planner, machine: Node, mark: Mark) -> Mark:
    firing = desk.firing.get(machine.name, [])
    told = {alert.fingerprint for alert in firing}
    still = [name for name in mark.alerts if name not in desk.resolved.get(machine.name, ())]
    alerts = kept([*still, *(alert.fingerprint for alert in firing)])
    # An action ends with the alert that required it. Silence is no end, and a cloud's termination cannot be undone.
    lasts = bool(set(still) - told) or not firing or mark.terminating_since is not None
    wanted = min(max((alert.mode for alert in firing), default=mark.mode), desk.sight.rules.mode)
    mode = max(mark.mode, wanted) if lasts else wanted
    clear = None if alerts else (mark.clear_since or desk.now)
    drains = mode >= Mode.DRAIN and clear is None
    overruled = mark.overruled or not machine.unschedulable
    # A replacement in progress ends if an administrator un-cordoned the node, if it is no longer allowed, or if pods
    # are there again; these are drained from the start.
    ends = overruled or min(mode, desk.sight.rules.mode) < Mode.REPLACE or bool(_left(desk, machine, mark))
    terminating = None if ends else mark.terminating_since
    began = mark.draining_since if terminating == mark.terminating_since else None
    return replace(
        mark,
        mode=mode,
        message=alert_summary(firing) if firing and (mode > mark.mode or not lasts) else mark.message,
        alerts=alerts,
        clear_since=clear,
        draining_since=(began or desk.now) if drains else None,
        terminating_since=terminating,
        overruled=overruled,
        until_reboot=mark.until_reboot or any(alert.until_reboot for alert in firing),
    )


def _unheard(desk: Planner, machine: Node, mark: Mark) -> bool:
    """Return whether no notification of its alerts has arrived for long, including repeated ones."""
    since = [desk.sight.listens_since or desk.now, mark.since]
    since += [alert.heard for alert in desk.firing.get(machine.name, ()) if alert.fingerprint in mark.alerts]
    return bool(mark.alerts) and desk.now - max(since) >= UNHEARD


def _rebooted(machine: Node, mark: Mark) -> bool:
    return bool(machine.boot_id and mark.boot_id) and machine.boot_id != mark.boot_id


def _doubt(machine: Node, mark: Mark) -> str:
    """Return the reason against the release of a node whose alerts are resolved; empty if there is none."""
    if mark.until_reboot and not _rebooted(machine, mark):
        return messages.nodes.gpu_needs_reset()
    if not machine.ready:
        return messages.nodes.not_ready()
    if machine.gpus < mark.gpus:
        return messages.nodes.gpus_missing(machine.gpus, mark.gpus)
    return ""


def _released(desk: Planner, machine: Node, mark: Mark) -> bool:
    """Un-cordon a recovered node, or forget one that an administrator un-cordoned."""
    if mark.terminating_since is not None:
        return False
    if mark.overruled:
        ends = messages.nodes.alerts_resolved() if mark.clear_since is not None else ""
        ends = ends or (messages.nodes.rebooted() if _rebooted(machine, mark) else "")
        ends = ends or (messages.nodes.alerts_silent() if _unheard(desk, machine, mark) else "")
    else:
        wait = desk.sight.rules.release_after
        over = wait is not None and mark.clear_since is not None and desk.now - mark.clear_since >= wait
        ends = messages.nodes.alerts_resolved() if over and not _doubt(machine, mark) else ""
    if not ends:
        return False
    desk.actions.append(Release(machine=machine, uncordon=not mark.overruled))
    desk.note(machine, mark)
    desk.say(machine, NodeReason.NODE_RELEASED, messages.nodes.released(mark.message, ends))
    return True


def _say_clear(desk: Planner, machine: Node, mark: Mark) -> None:
    wait = desk.sight.rules.release_after
    if wait is None or mark.clear_since is None:
        desk.say(machine, NodeReason.ALERTS_RESOLVED, messages.nodes.uncordon_yourself(mark.message))
        return
    doubt = _doubt(machine, mark)
    if doubt:
        message = messages.nodes.uncordon_later(mark.message, doubt, machine.name)
        desk.say(machine, NodeReason.ALERTS_RESOLVED, message, warning=True)
        return
    desk.requeue_in(mark.clear_since + wait - desk.now)
    desk.say(machine, NodeReason.ALERTS_RESOLVED, messages.nodes.uncordon_soon(mark.message))


def _left(desk: Planner, machine: Node, mark: Mark) -> tuple[NodePod, ...] | None:
    """Return the pods to wait for; None if unknown.

    The kubelet of a dead node ends no deleted pods. With ``force``, a pod whose deletion hangs (a finalizer or a hung
    container runtime) is waited for only until the deadline and its own grace period have passed.
    """
    if machine.pods is None:
        return None
    started = mark.draining_since
    forced = desk.sight.rules.force and started is not None and desk.now - started >= desk.sight.rules.drain_deadline

    def stays(pod: NodePod) -> bool:
        if pod.deleted_at is None:
            return True
        hangs = forced and pod.stay is not StayReason.OPTED_OUT and desk.now - pod.deleted_at >= _OVERDUE
        return machine.ready and not hangs

    return tuple(pod for pod in machine.pods if stays(pod))


def _drain(desk: Planner, machine: Node, mark: Mark) -> None:
    started = mark.draining_since or desk.now
    late = desk.now - started >= desk.sight.rules.drain_deadline
    force = late and desk.sight.rules.force
    left = _left(desk, machine, mark)
    going = [
        pod for pod in left or () if pod.stay is StayReason.EVICTABLE or (force and pod.stay is StayReason.UNMANAGED)
    ]
    for pod in going:
        if not pod.deleting and desk.now - started >= pod.patience:
            desk.actions.append(Evict(machine=machine, pod=pod, force=force))
    if left == ():
        _drained(desk, machine, mark)
        return
    desk.requeue_in(desk.sight.timings.drain_poll if going else desk.sight.timings.marked_poll)
    if left and not going:
        message = messages.nodes.drain_waits(mark.message, listed(f"{pod} ({pod.stay})" for pod in left))
        desk.say(machine, NodeReason.DRAIN_WAITS, message, warning=True)
    elif left and late and not force:
        message = messages.nodes.drain_incomplete(mark.message, listed(map(str, left)))
        desk.say(machine, NodeReason.DRAIN_INCOMPLETE, message, warning=True)
    else:
        desk.say(machine, NodeReason.NODE_DRAINING, messages.nodes.draining(mark.message), warning=True)


def _drained(desk: Planner, machine: Node, mark: Mark) -> None:
    if min(mark.mode, desk.sight.rules.mode) < Mode.REPLACE:
        desk.say(machine, NodeReason.NODE_DRAINED, messages.nodes.node_drained(mark.message), warning=True)
        return
    mark = replace(mark, terminating_since=desk.now)
    desk.note(machine, mark)
    desk.actions = [action for action in desk.actions if action.machine != machine]
    desk.actions += [SetMark(machine=machine, mark=mark), Terminate(machine=machine)]
    desk.requeue_in(POLL_CLOUD)
    desk.say(machine, NodeReason.NODE_REPLACED, messages.nodes.replacing(mark.message), warning=True)
