"""``remedy(sight, now) -> Plan``: what to do about sick nodes. Pure, total, the same answer for the same input.

Invariants: nothing is done to a node without our mark, and no node is marked that somebody else cordoned; no pod of a
job that opted out is evicted, and no node with one is terminated; of all nodes that may be chosen, never more than
``max_unavailable`` are away through us, and never more than ``max_per_hour`` are begun within an hour. The mark is
written before anything else is done to its node, so a crash anywhere is made good by the next pass.

An alert that vanishes is not an alert that is resolved: Alertmanager reports both alike. So a node whose GPU needs
a reset is given back only once it has booted again, and none that is not Ready or has lost GPUs since it was marked.
A new machine under an old name is another machine: alerts that began before its node was created are not about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum

from holdfast_operator.api.node_mark import ALERTS_KEPT, Mark, Mode
from holdfast_operator.remediation.alerts import Alert
from holdfast_operator.remediation.settings import RemediationSettings

HOUR = timedelta(hours=1)
POLL_DRAIN = timedelta(seconds=2)
POLL_MARKED = timedelta(seconds=20)
POLL_HELD = timedelta(seconds=20)
POLL_CLOUD = timedelta(seconds=30)
# Three of Alertmanager's default repeat_interval. It sends nothing of an alert that is silenced, its end neither.
UNHEARD = timedelta(hours=12)
# Beyond a pod's own grace period, for a kubelet that is slow.
_OVERDUE = timedelta(seconds=30)
_CONTROL_PLANE = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
_NAMED = 3


class StayReason(StrEnum):
    """Why a pod is still on a node that is drained."""

    EVICTABLE = "leaves"
    OPTED_OUT = "its job opted out of node remediation"
    UNMANAGED = "nothing would make it again"


@dataclass(frozen=True, kw_only=True)
class NodePod:
    """A pod that the drain is about. ``patience``: so long its job gets it away by itself, with a checkpoint."""

    namespace: str
    name: str
    uid: str
    stay: StayReason = StayReason.EVICTABLE
    patience: timedelta = timedelta(0)
    deleted_at: datetime | None = None
    """When its grace period ends, if its deletion was asked for."""

    @property
    def deleting(self) -> bool:
        """Whether its deletion was asked for."""
        return self.deleted_at is not None

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node. ``pods`` are known of marked ones only; None: not read, which is not the same as none."""

    name: str
    uid: str
    version: str
    ready: bool = True
    unschedulable: bool = False
    created: datetime | None = None
    boot_id: str = ""
    gpus: int = 0
    provider_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    mark: Mark | None = None
    marked: bool = False
    pods: tuple[NodePod, ...] | None = None

    @property
    def away(self) -> bool:
        """It takes no pods, whoever brought that about."""
        return not self.ready or self.unschedulable

    @property
    def control_plane(self) -> bool:
        """Never touched."""
        return any(label in self.labels for label in _CONTROL_PLANE)


@dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """What outlives a mark, for rate and cool-down.

    Noted with the mark, since its node may be taken away at any time, and again when the mark is about to go.
    """

    node: str
    started: datetime
    ended: datetime
    uid: str = ""

    @property
    def only_begun(self) -> bool:
        """The mark was to be written, and lives if it was."""
        return self.ended == self.started


@dataclass(frozen=True, kw_only=True)
class FleetSnapshot:
    """All that one plan depends on, besides the time."""

    rules: RemediationSettings
    alerts: tuple[Alert, ...] = ()
    machines: tuple[Node, ...] = ()
    history: tuple[HistoryEntry, ...] = ()
    listens_since: datetime | None = None
    """When this process began to listen to Alertmanager."""


@dataclass(frozen=True, kw_only=True)
class SetMark:
    """Write the mark; with ``cordon`` the node takes no new pods from then on, in the same write."""

    machine: Node
    mark: Mark
    cordon: bool = False


@dataclass(frozen=True, kw_only=True)
class Release:
    """Take the mark away, and the cordon with it where that is still ours."""

    machine: Node
    uncordon: bool


@dataclass(frozen=True, kw_only=True)
class Evict:
    """Ask for a pod's eviction; ``force``: delete it, whatever budgets say."""

    machine: Node
    pod: NodePod
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class Terminate:
    """Have the cloud take the machine away and bring another."""

    machine: Node


Action = SetMark | Release | Evict | Terminate


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was decided about a node, doing nothing included; the same words in event, log and metric."""

    node: str
    uid: str
    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Write ``history`` first, then do ``actions`` in order; one that fails stops the others of its node, but for
    an eviction."""

    actions: tuple[Action, ...]
    decisions: tuple[Decision, ...]
    history: tuple[HistoryEntry, ...]
    requeue_after: float | None


@dataclass(kw_only=True)
class _Planner:
    """The plan under way; lives within one call."""

    sight: FleetSnapshot
    now: datetime
    firing: dict[str, list[Alert]]
    resolved: dict[str, set[str]]
    history: tuple[HistoryEntry, ...]
    pool: frozenset[str]  # nodes that may be chosen
    away: set[str]  # of those; what this plan begins is added
    lately: tuple[tuple[datetime, str], ...]  # begun within an hour before this plan, with the UID where only begun
    actions: list[Action] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    begun: set[str] = field(default_factory=set)
    wake: timedelta | None = None

    def say(self, machine: Node, reason: str, message: str, *, warning: bool = False) -> None:
        self.decisions.append(
            Decision(node=machine.name, uid=machine.uid, reason=reason, message=message, warning=warning)
        )

    def requeue_in(self, after: timedelta) -> None:
        after = max(after, timedelta(seconds=0.2))
        self.wake = after if self.wake is None else min(self.wake, after)

    def note(self, machine: Node, mark: Mark) -> None:
        others = (
            entry
            for entry in self.history
            if (entry.node, entry.started) != (machine.name, mark.since) and not _unmarked_yet(entry, machine)
        )
        self.history = (*others, HistoryEntry(node=machine.name, uid=machine.uid, started=mark.since, ended=self.now))


def _unmarked_yet(entry: HistoryEntry, machine: Node) -> bool:
    """It tells of a mark that this node, which has none, did not get: the write failed."""
    return machine.mark is None and entry.only_begun and entry.uid == machine.uid


def remedy(sight: FleetSnapshot, now: datetime) -> Plan:
    """What to do about all nodes."""
    # Once for all nodes: in a storm each of thousands asks for it.
    pool = frozenset(m.name for m in sight.machines if not m.control_plane and _selected(m, sight.rules))
    desk = _Planner(
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
        _tend(desk, machine)
    unmarked = [machine for machine in sight.machines if machine.mark is None and machine.name in desk.firing]
    for machine in sorted(unmarked, key=lambda machine: (desk.firing[machine.name][0].started, machine.name)):
        _consider(desk, machine)
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


# Nodes without a mark


def _consider(desk: _Planner, machine: Node) -> None:
    told = desk.firing[machine.name]
    alerts = [alert for alert in told if machine.created is None or alert.started >= machine.created]
    if not alerts:
        words = "it began before this node was created, so it is about another machine of this name"
        desk.say(machine, "StaleAlert", f"{_words(told)}: {words}; nothing is done unless it begins again")
        return
    mode = min(max(alert.mode for alert in alerts), desk.sight.rules.mode)
    why = _words(alerts)
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
        alerts=_kept(alert.fingerprint for alert in alerts),
        draining_since=desk.now if mode >= Mode.DRAIN else None,
        until_reboot=any(alert.until_reboot for alert in alerts),
        boot_id=machine.boot_id,
        gpus=machine.gpus,
    )
    desk.actions.append(SetMark(machine=machine, mark=mark, cordon=True))
    desk.note(machine, mark)
    desk.say(machine, "NodeCordoned", f"{why}; the node is cordoned, mode {mode.word}", warning=True)
    desk.requeue_in(POLL_DRAIN if mode >= Mode.DRAIN else POLL_MARKED)


def _held(desk: _Planner, machine: Node, alerts: list[Alert]) -> tuple[str, str] | None:
    """What keeps a node from being acted on."""
    rules = desk.sight.rules
    if machine.marked:
        return "MarkUnreadable", "its mark cannot be read; remove the annotation holdfast.dev/remediation"
    if machine.control_plane:
        return "ControlPlane", "nodes of the control plane are never touched"
    if not _selected(machine, rules):
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


def _broken(desk: _Planner, machine: Node, *, goes_on: bool) -> tuple[str, str] | None:
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


def _selected(machine: Node, rules: RemediationSettings) -> bool:
    return all(machine.labels.get(key) == value for key, value in rules.node_selector.items())


# Nodes with our mark


def _tend(desk: _Planner, machine: Node) -> None:
    rules, before = desk.sight.rules, machine.mark
    if before is None or rules.dry_run or rules.mode is Mode.OBSERVE:
        words = "the node bears a mark of an earlier setting; un-cordon it when it is well"
        desk.say(machine, "NodeLeftMarked", words, warning=True)
        return
    mark = _brought_up_to_date(desk, machine, before)
    if _released(desk, machine, mark):
        return
    if mark != before:
        desk.actions.append(SetMark(machine=machine, mark=mark))
    desk.requeue_in(POLL_MARKED)
    if mark.terminating_since is not None:
        desk.say(machine, "NodeReplaced", f"{mark.message}; its machine is being replaced", warning=True)
        if _left(desk, machine, mark) == ():
            desk.actions.append(Terminate(machine=machine))
        desk.requeue_in(POLL_CLOUD)
    elif mark.overruled:
        desk.say(
            machine, "Overruled", f"{mark.message}; somebody un-cordoned it: it is left alone while the alert lasts"
        )
    elif mark.clear_since is not None:
        _say_clear(desk, machine, mark)
    elif _unheard(desk, machine, mark):
        hours = int(UNHEARD / HOUR)
        words = (
            f"Alertmanager has sent nothing about it for {hours} h, as when an alert is silenced; nothing more is "
            f"done to the node, which stays cordoned. If it is well: kubectl uncordon {machine.name}"
        )
        desk.say(machine, "AlertUnheard", f"{mark.message}; {words}", warning=True)
    elif min(mark.mode, rules.mode) >= Mode.DRAIN:
        _drain(desk, machine, mark)
    else:
        desk.say(
            machine, "NodeCordoned", f"{mark.message}; the node is cordoned, mode {mark.mode.word}", warning=True
        )


def _brought_up_to_date(desk: _Planner, machine: Node, mark: Mark) -> Mark:
    firing = desk.firing.get(machine.name, [])
    told = {alert.fingerprint for alert in firing}
    still = [name for name in mark.alerts if name not in desk.resolved.get(machine.name, ())]
    alerts = _kept([*still, *(alert.fingerprint for alert in firing)])
    # What was asked for ends with the alert that asked. Silence is no end, and the cloud takes back nothing.
    lasts = bool(set(still) - told) or not firing or mark.terminating_since is not None
    wanted = min(max((alert.mode for alert in firing), default=mark.mode), desk.sight.rules.mode)
    mode = max(mark.mode, wanted) if lasts else wanted
    clear = None if alerts else (mark.clear_since or desk.now)
    drains = mode >= Mode.DRAIN and clear is None
    overruled = mark.overruled or not machine.unschedulable
    # A replacement that was begun ends where somebody un-cordoned the node, where it is allowed no more, and where
    # pods are back: those are drained from the start.
    ends = overruled or min(mode, desk.sight.rules.mode) < Mode.REPLACE or bool(_left(desk, machine, mark))
    terminating = None if ends else mark.terminating_since
    began = mark.draining_since if terminating == mark.terminating_since else None
    return replace(
        mark,
        mode=mode,
        message=_words(firing) if firing and (mode > mark.mode or not lasts) else mark.message,
        alerts=alerts,
        clear_since=clear,
        draining_since=(began or desk.now) if drains else None,
        terminating_since=terminating,
        overruled=overruled,
        until_reboot=mark.until_reboot or any(alert.until_reboot for alert in firing),
    )


def _unheard(desk: _Planner, machine: Node, mark: Mark) -> bool:
    """Nothing has come about any of its alerts for long, repetitions included."""
    since = [desk.sight.listens_since or desk.now, mark.since]
    since += [alert.heard for alert in desk.firing.get(machine.name, ()) if alert.fingerprint in mark.alerts]
    return bool(mark.alerts) and desk.now - max(since) >= UNHEARD


def _rebooted(machine: Node, mark: Mark) -> bool:
    return bool(machine.boot_id and mark.boot_id) and machine.boot_id != mark.boot_id


def _doubt(machine: Node, mark: Mark) -> str:
    """What speaks against giving back a node whose alerts are resolved; empty if nothing does."""
    if mark.until_reboot and not _rebooted(machine, mark):
        return "its GPU needs a reset, so that proves nothing; it is un-cordoned after a reboot"
    if not machine.ready:
        return "it is un-cordoned once it is Ready"
    if machine.gpus < mark.gpus:
        return f"it has {machine.gpus} of {mark.gpus} GPUs; it is un-cordoned once it has all"
    return ""


def _released(desk: _Planner, machine: Node, mark: Mark) -> bool:
    """Un-cordon what is well again, or forget what somebody else un-cordoned."""
    if mark.terminating_since is not None:
        return False
    if mark.overruled:
        ends = "its alerts are resolved" if mark.clear_since is not None else ""
        ends = ends or ("it has booted since" if _rebooted(machine, mark) else "")
        ends = ends or ("nothing is sent about its alerts any more" if _unheard(desk, machine, mark) else "")
    else:
        wait = desk.sight.rules.release_after
        over = wait is not None and mark.clear_since is not None and desk.now - mark.clear_since >= wait
        ends = "its alerts are resolved" if over and not _doubt(machine, mark) else ""
    if not ends:
        return False
    desk.actions.append(Release(machine=machine, uncordon=not mark.overruled))
    desk.note(machine, mark)
    desk.say(machine, "NodeReleased", f"{mark.message}: {ends}; the node takes pods again")
    return True


def _say_clear(desk: _Planner, machine: Node, mark: Mark) -> None:
    wait = desk.sight.rules.release_after
    if wait is None or mark.clear_since is None:
        desk.say(machine, "AlertsResolved", f"{mark.message}: its alerts are resolved; un-cordon it when it is well")
        return
    doubt = _doubt(machine, mark)
    if doubt:
        words = f"its alerts are resolved, but {doubt}, or when you do it: kubectl uncordon {machine.name}"
        desk.say(machine, "AlertsResolved", f"{mark.message}: {words}", warning=True)
        return
    desk.requeue_in(mark.clear_since + wait - desk.now)
    desk.say(machine, "AlertsResolved", f"{mark.message}: its alerts are resolved; it is un-cordoned if they stay so")


def _left(desk: _Planner, machine: Node, mark: Mark) -> tuple[NodePod, ...] | None:
    """The pods to wait for; None: not known.

    The kubelet of a dead node ends none that are to be deleted. With ``force``, one whose deletion hangs (a finalizer
    or a hung container runtime) is waited for no longer than the deadline, and than its own grace period.
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


def _drain(desk: _Planner, machine: Node, mark: Mark) -> None:
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
    desk.requeue_in(POLL_DRAIN if going else POLL_MARKED)
    if left and not going:
        words = f"waits for {_listed(f'{pod} ({pod.stay})' for pod in left)}"
        desk.say(machine, "DrainWaits", f"{mark.message}; {words}", warning=True)
    elif left and late and not force:
        words = f"still there past the deadline: {_listed(map(str, left))}"
        desk.say(machine, "DrainIncomplete", f"{mark.message}; {words}", warning=True)
    else:
        desk.say(machine, "NodeDraining", f"{mark.message}; the node is being drained", warning=True)


def _drained(desk: _Planner, machine: Node, mark: Mark) -> None:
    if min(mark.mode, desk.sight.rules.mode) < Mode.REPLACE:
        desk.say(machine, "NodeDrained", f"{mark.message}; the node is drained and stays cordoned", warning=True)
        return
    mark = replace(mark, terminating_since=desk.now)
    desk.note(machine, mark)
    desk.actions = [action for action in desk.actions if action.machine != machine]
    desk.actions += [SetMark(machine=machine, mark=mark), Terminate(machine=machine)]
    desk.requeue_in(POLL_CLOUD)
    desk.say(machine, "NodeReplaced", f"{mark.message}; its machine is being replaced", warning=True)


def _words(alerts: list[Alert]) -> str:
    told = (f"{alert.name} ({alert.summary})" if alert.summary else alert.name for alert in alerts)
    return f"alert {_listed(dict.fromkeys(told))}"


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more


def _kept(fingerprints: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(fingerprints))[:ALERTS_KEPT]
