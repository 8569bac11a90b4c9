"""One pass over one job: observe, decide, act. Runs in the queue's threads, one pass per job at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from holdfast_operator.cluster.agent_hub import AgentHub
from holdfast_operator.cluster.cache import Cache
from holdfast_operator.decision.decide import decide
from holdfast_operator.decision.plan import Plan, Publish
from holdfast_operator.decision.snapshot import Observed
from holdfast_operator.errors import ClusterError, ConflictError
from holdfast_operator.reconcile.act import Actor
from holdfast_operator.reconcile.job_memories import JobMemories, JobMemory
from holdfast_operator.reconcile.job_metrics import JobMetrics
from holdfast_operator.reconcile.observe import JobObserver
from holdfast_operator.runtime.logs import set_generation
from holdfast_operator.runtime.metrics import Metrics

# Fields of a status that launchers report, or that record what was applied. A change of them alone needs no action.
_TOLD = ("progress", "last_checkpoint", "goodput", "applied")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a pass: the time of the next pass (None: not before an event), and the events to write.

    Events are written when the job is free for its next pass, which may replace a worker. ``failure`` is the reason
    why a part must be repeated. The decisions are in the status, and their events are written in any case.
    """

    requeue_after: float | None = None
    tell: Callable[[], None] | None = None
    failure: ClusterError | None = None


class Reconciler:
    """Observes, decides and acts on one job at a time."""

    def __init__(
        self,
        *,
        observer: JobObserver,
        actor: Actor,
        cache: Cache,
        hub: AgentHub,
        metrics: Metrics,
        clock: Callable[[], datetime],
    ) -> None:
        self._observer = observer
        self._actor = actor
        self._cache = cache
        self._hub = hub
        self._metrics = JobMetrics(metrics)
        self._memories = JobMemories()
        self._clock = clock

    def run(self, key: str) -> Outcome:
        """Run one pass. Raises ``ClusterError``; ``ConflictError`` means that a newer version exists: run again."""
        memory = self._memories.of(key)
        seen = self._observer.cached(key, memory, self._clock())
        if seen is None:
            return self._forget(key)
        plan, failure = decide(seen, self._clock()), None
        if _anything(seen, plan):
            if not _tells_only(seen, plan):
                seen = self._observer.live(key, memory, self._clock())
                if seen is None:
                    return self._forget(key)
                plan = decide(seen, self._clock())
            failure = self._carry_out(key, seen, plan, memory)
        self._metrics.record(seen.job, plan)
        self._forget_pods(key, seen, plan)
        events = self._actor.granted(seen.job, plan.events, plan.decided_at)
        tell = partial(self._actor.tell, seen.job, events, plan.decided_at)
        return Outcome(requeue_after=plan.requeue_after, tell=tell if events else None, failure=failure)

    def refresh(self) -> None:
        """Drop the state of objects that are gone."""
        self._observer.forget()

    def _carry_out(self, key: str, seen: Observed, plan: Plan, memory: JobMemory) -> ClusterError | None:
        replaced = self._memories.replaced(key, seen.job.uid)
        if replaced is not None:
            self._hub.forget_job(replaced)
            raise ConflictError(f"{key} was deleted and made again")
        set_generation(plan.status.membership.generation)
        written = self._actor.write_status(seen.job, plan)
        if written is not None:
            self._cache.put_job(written)
        self._metrics.count(plan)
        memory, failure = self._actor.act(seen.job, plan, memory)
        self._memories.keep(key, memory)
        return failure

    def _forget(self, key: str) -> Outcome:
        uid = self._memories.forget(key)
        if uid is not None:
            self._hub.forget_job(uid)
        self._metrics.forget(key)
        return Outcome()

    def _forget_pods(self, key: str, seen: Observed, plan: Plan) -> None:
        uids = {pod.uid for pod in seen.pods} | {worker.pod_uid for worker in plan.status.workers}
        for uid in self._memories.gone_pods(key, uids):
            self._hub.forget_pod(uid)


def _anything(seen: Observed, plan: Plan) -> bool:
    return bool(plan.actions or plan.events) or plan.status != seen.status


def _tells_only(seen: Observed, plan: Plan) -> bool:
    """Return whether the plan only copies reports into the status, which needs no new read.

    Most passes over jobs that train are of this kind. The status is written on the version that was read, so a stale
    pass changes nothing.
    """
    if plan.events or any(not isinstance(action, Publish) for action in plan.actions):
        return False
    told = {name: getattr(plan.status, name) for name in _TOLD}
    return replace(seen.status, **told) == plan.status
