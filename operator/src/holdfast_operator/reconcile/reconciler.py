"""One pass over one job: observe, decide, act. Runs in the queue's threads, one pass a job at a time."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from holdfast_operator.api import names as c
from holdfast_operator.api.spec.spec import JobSpec
from holdfast_operator.api.status import Status
from holdfast_operator.cluster.agent_hub import AgentHub
from holdfast_operator.cluster.cache import Cache
from holdfast_operator.decision.decide import decide
from holdfast_operator.decision.plan import Plan, Publish
from holdfast_operator.decision.snapshot import Observed
from holdfast_operator.errors import ClusterError, ConflictError
from holdfast_operator.reconcile.act import Actor
from holdfast_operator.reconcile.observe import JobMemory, JobObserver
from holdfast_operator.runtime.logs import set_generation
from holdfast_operator.runtime.metrics import Metrics

logger = logging.getLogger(__name__)

# What of a status launchers tell, and what was applied: nothing is done because of it alone.
_TOLD = ("progress", "last_checkpoint", "goodput", "applied")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is left of a pass: when to look again, None for not before something happens; and the events to tell.

    They are told once the job is free for its next pass, which may be what a worker is replaced in. A ``failure`` is
    why some of it is to be tried again; what was decided stands in the status, and is told all the same.
    """

    requeue_after: float | None = None
    tell: Callable[[], None] | None = None
    failure: ClusterError | None = None


class Reconciler:
    """Keeps what a process remembers of its jobs between passes."""

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
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._memories: dict[str, JobMemory] = {}
        self._uids: dict[str, str] = {}
        self._states: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._bound: dict[str, set[str]] = {}

    def run(self, key: str) -> Outcome:
        """One pass. Raises ``ClusterError``; ``ConflictError`` means that a newer version exists: run again."""
        memory = self._memory(key)
        seen = self._observer.cached(key, memory, self._clock())
        if seen is None:
            self._forget(key)
            return Outcome()
        plan, failure = decide(seen, self._clock()), None
        if _anything(seen, plan):
            if not _tells_only(seen, plan):
                seen = self._observer.live(key, memory, self._clock())
                if seen is None:
                    self._forget(key)
                    return Outcome()
                plan = decide(seen, self._clock())
            failure = self._carry_out(key, seen, plan, memory)
        self._account(key, seen, plan)
        events = self._actor.granted(seen.job, plan.events, plan.decided_at)
        tell = partial(self._actor.tell, seen.job, events, plan.decided_at)
        return Outcome(requeue_after=plan.requeue_after, tell=tell if events else None, failure=failure)

    def refresh(self) -> None:
        """Keep nothing in memory of objects that are gone."""
        self._observer.forget()

    def _carry_out(self, key: str, seen: Observed, plan: Plan, memory: JobMemory) -> ClusterError | None:
        self._same_job(key, seen)
        set_generation(plan.status.membership.generation)
        written = self._actor.write_status(seen.job, plan)
        if written is not None:
            self._cache.put_job(written)
        for cause in plan.counted:
            self._metrics.restart(cause)
        for word in plan.decided:
            self._metrics.decided(word.cause, word.action, word.reason)
        for recovered in plan.recovered:
            self._metrics.recovered(recovered.cause, recovered.seconds, recovered.lost_steps)
        memory, failure = self._actor.act(seen.job, plan, memory)
        with self._lock:
            self._memories[key] = memory
        return failure

    def _same_job(self, key: str, seen: Observed) -> None:
        """A job applied again under an old name is another one: what was remembered of the old one goes."""
        before = self._uids.get(key)
        if before is not None and before != seen.job.uid:
            self._hub.forget_job(before)
            with self._lock:
                self._memories.pop(key, None)
            self._uids[key] = seen.job.uid
            raise ConflictError(f"{key} was deleted and made again")
        self._uids[key] = seen.job.uid

    def _memory(self, key: str) -> JobMemory:
        with self._lock:
            return self._memories.get(key, JobMemory())

    def _forget(self, key: str) -> None:
        namespace, _, name = key.partition("/")
        uid = self._uids.pop(key, None)
        if uid is not None:
            self._hub.forget_job(uid)
        self._metrics.forget_job(namespace, name)
        with self._lock:
            self._memories.pop(key, None)
            self._bound.pop(key, None)
        self._count(key, None)

    def _count(self, key: str, state: str | None) -> None:
        """The job is in this state now; None: it is gone."""
        with self._lock:
            before = self._states.pop(key, None)
            if state is not None:
                self._states[key] = state
            if before == state:
                return
            self._counts.update(filter(None, (state,)))
            self._counts.subtract(filter(None, (before,)))
            self._metrics.set_jobs(self._counts)

    def _account(self, key: str, seen: Observed, plan: Plan) -> None:
        """Metrics, and pods that nobody will hear of again."""
        status, job = plan.status, seen.job
        self._count(key, state_of(status))
        uids = {pod.uid for pod in seen.pods} | {worker.pod_uid for worker in status.workers}
        with self._lock:
            gone = self._bound.get(key, set()) - uids
            self._bound[key] = uids
        for uid in gone:
            self._hub.forget_pod(uid)
        if status.terminal:
            self._metrics.forget_job(job.namespace, job.name)
        elif job.spec is not None:
            ready = status.ready.partition("/")[0]
            self._metrics.set_job(
                job.namespace,
                job.name,
                workers=0 if job.spec.suspend else job.spec.replicas,
                ready=int(ready) if ready.isdigit() else 0,
                step=status.progress.step if status.progress else None,
            )
            self._metrics.set_budgets(job.namespace, job.name, budgets_of(job.spec, status, plan.decided_at))


def _anything(seen: Observed, plan: Plan) -> bool:
    return bool(plan.actions or plan.events) or plan.status != seen.status


def _tells_only(seen: Observed, plan: Plan) -> bool:
    """Whether it does nothing but pass on what reports and status say, for which nothing need be read anew.

    Most of what is done for jobs that train is that. The status is written on the version that was read, so a stale
    one changes nothing.
    """
    if plan.events or any(not isinstance(action, Publish) for action in plan.actions):
        return False
    told = {name: getattr(plan.status, name) for name in _TOLD}
    return replace(seen.status, **told) == plan.status


def state_of(status: Status) -> str:
    """The one word by which jobs are counted."""
    for kind in (c.FAILED, c.COMPLETE, c.SUSPENDED, c.RESTARTING, c.DEGRADED, c.READY):
        if status.holds(kind):
            return kind
    return "Pending"


def budgets_of(spec: JobSpec, status: Status, now: datetime) -> dict[str, tuple[int, int]]:
    """By cause: incidents within the budget's window, and how many it allows."""
    counts = {count.cause: count for count in status.restarts}
    return {
        budget.cause: (
            len(counts[budget.cause].within(now, budget.window_seconds)) if budget.cause in counts else 0,
            budget.max_restarts,
        )
        for budget in spec.budgets
    }
