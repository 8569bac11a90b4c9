"""The result of a remediation pass, and its draft."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from holdfast_operator.api.node_mark import Mark
from holdfast_operator.api.reasons import NodeReason
from holdfast_operator.remediation.alerts import Alert
from holdfast_operator.remediation.fleet import FleetSnapshot, HistoryEntry, Node, NodePod

HOUR = timedelta(hours=1)
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class SetMark:
    """Write the mark. With ``cordon``, the same write stops new pods on the node."""

    machine: Node
    mark: Mark
    cordon: bool = False


@dataclass(frozen=True, kw_only=True)
class Release:
    """Remove the mark, and the cordon if it is still ours."""

    machine: Node
    uncordon: bool


@dataclass(frozen=True, kw_only=True)
class Evict:
    """Evict a pod. With ``force``, delete it regardless of disruption budgets."""

    machine: Node
    pod: NodePod
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class Terminate:
    """Have the cloud terminate the machine and start another."""

    machine: Node


Action = SetMark | Release | Evict | Terminate


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A decision about a node, including the decision to do nothing. Event, log and metric have the same reason."""

    node: str
    uid: str
    reason: NodeReason
    message: str
    warning: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Write ``history`` first, then execute ``actions`` in order.

    A failed action stops the others of its node, except for an eviction.
    """

    actions: tuple[Action, ...]
    decisions: tuple[Decision, ...]
    history: tuple[HistoryEntry, ...]
    requeue_after: float | None


@dataclass(kw_only=True)
class Planner:
    """The draft of a plan within one call."""

    sight: FleetSnapshot
    now: datetime
    firing: dict[str, list[Alert]]
    resolved: dict[str, set[str]]
    history: tuple[HistoryEntry, ...]
    pool: frozenset[str]  # nodes that may be chosen
    away: set[str]  # those of them that are away; what this plan begins is added
    lately: tuple[tuple[datetime, str], ...]  # begun in the hour before this plan, with the UID if only planned
    actions: list[Action] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    begun: set[str] = field(default_factory=set)
    wake: timedelta | None = None

    def say(self, machine: Node, reason: NodeReason, message: str, *, warning: bool = False) -> None:
        """Record a decision about a node."""
        self.decisions.append(
            Decision(node=machine.name, uid=machine.uid, reason=reason, message=message, warning=warning)
        )

    def requeue_in(self, after: timedelta) -> None:
        """Plan the next pass for this time at the latest."""
        after = max(after, timedelta(seconds=0.2))
        self.wake = after if self.wake is None else min(self.wake, after)

    def note(self, machine: Node, mark: Mark) -> None:
        """Record the mark in the history."""
        others = (
            entry
            for entry in self.history
            if (entry.node, entry.started) != (machine.name, mark.since) and not _unmarked_yet(entry, machine)
        )
        self.history = (*others, HistoryEntry(node=machine.name, uid=machine.uid, started=mark.since, ended=self.now))


def _unmarked_yet(entry: HistoryEntry, machine: Node) -> bool:
    """Return whether the record belongs to a mark that this node did not get because the write failed."""
    return machine.mark is None and entry.only_begun and entry.uid == machine.uid


def alert_summary(alerts: Iterable[Alert]) -> str:
    """Return the alerts' names and summaries."""
    told = (f"{alert.name} ({alert.summary})" if alert.summary else alert.name for alert in alerts)
    return f"alert {listed(dict.fromkeys(told))}"


def listed(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    found = list(names)
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more
