"""The immutable draft of a plan. Each policy receives it and returns a changed copy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.spec.spec import JobSpec
from holdfast_operator.api.status import ConditionType, Phase, Status, Worker
from holdfast_operator.api.timings import Timings
from holdfast_operator.decision.plan import Action, DecisionMetric, DivergenceMetric, Event, RecoveryMetric
from holdfast_operator.decision.set_condition import Reason, set_condition
from holdfast_operator.decision.snapshot import Observed
from holdfast_operator.scheduling.capacity import FreeCapacity
from holdfast_operator.scheduling.fit import place
from holdfast_operator.views import NodeView, PodView


@dataclass(frozen=True, kw_only=True)
class PlanDraft:
    """The plan as far as the policies have decided it."""

    seen: Observed
    now: datetime
    status: Status
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    counted: tuple[str, ...] = ()
    decided: tuple[DecisionMetric, ...] = ()
    recovered: tuple[RecoveryMetric, ...] = ()
    diverged: tuple[DivergenceMetric, ...] = ()
    hold: Reason | None = None  # why training does not continue; None: it does, or no policy gave a reason
    ended: bool = False  # no later policy runs
    wake: timedelta | None = None

    @property
    def spec(self) -> JobSpec:
        """The job's spec. Policies run after ``unreadable_spec``, so it is always readable."""
        spec = self.seen.job.spec
        if spec is None:
            raise AssertionError("a policy runs on a resource that cannot be read")
        return spec

    @property
    def timings(self) -> Timings:
        return self.seen.timings

    @property
    def target(self) -> int:
        """The number of workers that the job requests now."""
        if self.spec.suspend:
            return 0
        wanted = self.spec.replicas + self.status.extra
        return min(self.status.gang.size or wanted, wanted)

    @property
    def needed(self) -> tuple[Worker, ...]:
        """The wanted workers that train or are to train; the others are spares."""
        wanted = self.status.in_phase(Phase.WANTED)
        if not self.spec.spares:
            return wanted
        members = frozenset(self.status.membership.member_uids())
        ordered = sorted(
            wanted, key=lambda w: (w.pod_uid not in members, w.ready_at is None, not w.node, w.incarnation)
        )
        return tuple(ordered[: self.target])

    @property
    def finished(self) -> tuple[Worker, ...]:
        """Workers that completed their own part, in jobs without a rendezvous. They are not replaced."""
        if self.spec.rendezvous != c.NO_RENDEZVOUS:
            return ()
        return tuple(worker for worker in self.status.in_phase(Phase.ENDED) if worker.done)

    @property
    def spares(self) -> tuple[Worker, ...]:
        """The wanted workers that are on standby without a rank."""
        needed = {worker.incarnation for worker in self.needed}
        return tuple(w for w in self.status.in_phase(Phase.WANTED) if w.incarnation not in needed)

    def idle(self, worker: Worker) -> bool:
        """Return whether the worker has no rank and none is reserved for it. Its loss does not affect training."""
        if not self.spec.spares or not worker.known or worker.pod_uid in self.status.membership.named():
            return False
        members = frozenset(self.status.membership.member_uids())
        there = sum(other.pod_uid in members for other in self.status.in_phase(Phase.WANTED))
        return worker.spare or there >= self.target

    def with_status(self, **changes: Any) -> PlanDraft:
        """Return a copy with a changed status; return the same draft if nothing changes."""
        if all(getattr(self.status, name) == value for name, value in changes.items()):
            return self
        return replace(self, status=replace(self.status, **changes))

    def with_worker(self, worker: Worker) -> PlanDraft:
        """Return a copy with one worker replaced."""
        return replace(self, status=self.status.with_worker(worker))

    def with_condition(self, kind: ConditionType, holds: bool, words: Reason) -> PlanDraft:
        """Return a copy with this condition."""
        generation = self.seen.job.generation
        status = set_condition(self.status, kind, holds, words, generation=generation, now=self.now)
        return replace(self, status=status)

    def waiting_for(self, reason: str, message: str) -> PlanDraft:
        """Return a copy with the reason why training does not continue."""
        return replace(self, hold=Reason(reason, message))

    def with_action(self, *actions: Action) -> PlanDraft:
        """Return a copy with further actions."""
        return replace(self, actions=(*self.actions, *actions))

    def with_event(self, reason: str, message: str, *, warning: bool = False) -> PlanDraft:
        """Return a copy with a further event."""
        return replace(self, events=(*self.events, Event(reason=reason, message=message, warning=warning)))

    def with_decision_metric(self, word: DecisionMetric) -> PlanDraft:
        """Return a copy with a further decision for the metrics."""
        return replace(self, decided=(*self.decided, word))

    def requeue_in(self, after: timedelta) -> PlanDraft:
        """Return a copy whose next pass starts within ``after``, but not sooner than in 0.2 s."""
        after = max(after, timedelta(seconds=0.2))
        return replace(self, wake=after if self.wake is None else min(self.wake, after))

    @property
    def pace(self) -> timedelta:
        """The time to the next pass without an event. It grows with the number of jobs, to bound the load."""
        return max(self.timings.look_every, c.LOOK_FOR_EACH_JOB * self.seen.jobs)

    def requeue_soon(self) -> PlanDraft:
        """Return a copy whose next pass starts after ``pace`` even if no event triggers it."""
        return self.requeue_in(self.pace)

    def requeue_at(self, time: datetime) -> PlanDraft:
        """Return a copy whose next pass starts at this time at the latest."""
        return self.requeue_in(time - self.now)

    def pod(self, worker: Worker) -> PodView | None:
        """Return the worker's pod, or its last known state."""
        return self.seen.pod(worker.pod_uid)

    def node(self, worker: Worker) -> NodeView | None:
        return self.seen.node(worker.node)

    def can_place_elsewhere(self, node: str, workers: Iterable[Worker]) -> bool:
        """Return whether pods for these workers fit on nodes other than this one and the avoided ones.

        The pods of a packed job must stay in its topology domain while another worker of the job is there.
        """
        moved = {worker.incarnation: worker for worker in workers}
        stay = [w for w in self.status.in_phase(Phase.WANTED) if w.node and w.incarnation not in moved]
        free = [replace(worker, domain=worker.domain if stay else "", avoid=()) for worker in moved.values()]
        room = FreeCapacity(self.seen.nodes, self.seen.usage, self.now)
        return len(place(self.seen.job, self.seen.platform, room, free, self.avoided(node))[0]) == len(free)

    def some_worker(self) -> Worker:
        """Return a placeholder where the worker concerned is not known."""
        return Worker(incarnation=self.status.incarnations, batch=self.status.incarnations)

    def avoided(self, *nodes: str) -> tuple[str, ...]:
        """Return these nodes and those on which no new worker may be placed."""
        return (*(entry.node for entry in self.status.avoided if entry.required), *nodes)

    def changed_worker(self, worker: Worker, **changes: Any) -> PlanDraft:
        """Return a copy with these fields of one worker changed."""
        return self.with_worker(replace(worker, **changes))
