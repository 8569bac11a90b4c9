"""What policies hand on to each other: an immutable draft of the plan, each policy returning a changed copy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from holdfast_operator.actions import Action, Decided, Event, Recovered
from holdfast_operator.api import JobSpec
from holdfast_operator.capacity import Room
from holdfast_operator.policies.words import Words
from holdfast_operator.seen import NodeView, Observed, PodView
from holdfast_operator.status import Status, Worker


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The plan so far."""

    seen: Observed
    now: datetime
    status: Status
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    counted: tuple[str, ...] = ()
    decided: tuple[Decided, ...] = ()
    recovered: tuple[Recovered, ...] = ()
    hold: Words | None = None  # why training does not go on, when it does not
    ended: bool = False  # later policies have nothing to say
    wake: timedelta | None = None

    @property
    def spec(self) -> JobSpec:
        """The spec; policies after ``unreadable`` have one."""
        spec = self.seen.job.spec
        if spec is None:
            raise AssertionError("a policy runs on a resource that cannot be read")
        return spec

    @property
    def target(self) -> int:
        """How many workers are wanted now."""
        if self.spec.suspend:
            return 0
        wanted = self.spec.replicas + self.status.extra
        return min(self.status.gang.size or wanted, wanted)

    def but(self, **changes: Any) -> Draft:
        """A copy with changes to the status."""
        return replace(self, status=replace(self.status, **changes))

    def with_worker(self, worker: Worker) -> Draft:
        """A copy with one worker changed."""
        return replace(self, status=self.status.with_worker(worker))

    def act(self, *actions: Action) -> Draft:
        """A copy that does more."""
        return replace(self, actions=(*self.actions, *actions))

    def tell(self, reason: str, message: str, *, warning: bool = False) -> Draft:
        """A copy that says more."""
        return replace(self, events=(*self.events, Event(reason=reason, message=message, warning=warning)))

    def decide(self, word: Decided) -> Draft:
        """A copy with one more decision for the metrics."""
        return replace(self, decided=(*self.decided, word))

    def wake_in(self, after: timedelta) -> Draft:
        """A copy that is looked at again no later than this."""
        after = max(after, timedelta(seconds=0.2))
        return replace(self, wake=after if self.wake is None else min(self.wake, after))

    def wake_at(self, time: datetime) -> Draft:
        """A copy that is looked at again no later than at this time."""
        return self.wake_in(time - self.now)

    def pod(self, worker: Worker) -> PodView | None:
        """The worker's pod, or what was last seen of it."""
        return self.seen.pod(worker.pod_uid)

    def node(self, worker: Worker) -> NodeView | None:
        """The worker's node."""
        return self.seen.node(worker.node)

    def fits_without(self, node: str, pods: int = 1) -> bool:
        """Whether so many of the job's pods find room on other nodes than this one and those that it avoids."""
        avoid = (*(entry.node for entry in self.status.avoided), node)
        return Room(self.seen.nodes, self.seen.usage, self.now).place(self.spec.pod_spec, pods, avoid) == pods

    def changed_worker(self, worker: Worker, **changes: Any) -> Draft:
        """A copy with these fields of one worker changed."""
        return self.with_worker(replace(worker, **changes))
