"""The metrics of jobs, as their plans change them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from datetime import datetime

from holdfast_operator.api.job import Job
from holdfast_operator.api.spec.spec import JobSpec
from holdfast_operator.api.status import MOST_TELLING, ConditionType, Status
from holdfast_operator.decision.plan import Plan
from holdfast_operator.runtime.metrics import Metrics
from holdfast_operator.views.reports import SlowRank


class JobMetrics:
    """Sets the gauges and counters of jobs. Thread-safe."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._states: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def count(self, plan: Plan) -> None:
        """Count what a plan decided, once its status is written."""
        for cause in plan.counted:
            self._metrics.incident(cause)
        for word in plan.decided:
            self._metrics.decided(word.cause, word.action, word.reason)
        for recovered in plan.recovered:
            self._metrics.recovered(recovered.cause, recovered.seconds, recovered.lost_steps)
        for diverged in plan.diverged:
            self._metrics.diverged(diverged.ranks, repaired=diverged.repaired)

    def record(self, job: Job, plan: Plan) -> None:
        """Set the gauges of a job to its planned status."""
        status = plan.status
        self._set_state(job.key, state_of(status))
        if status.terminal:
            self._metrics.forget_job(job.namespace, job.name)
        elif job.spec is not None:
            self._metrics.set_job(
                job.namespace,
                job.name,
                workers=0 if job.spec.suspend else job.spec.replicas,
                ready=status.ready_workers,
                step=status.progress.step if status.progress else None,
            )
            self._metrics.set_budgets(job.namespace, job.name, budgets_of(job.spec, status, plan.decided_at))
            self._metrics.set_slow_ranks(job.namespace, job.name, ratios_of(plan.slow_ranks))

    def forget(self, key: str) -> None:
        """Drop all series of a deleted job."""
        namespace, _, name = key.partition("/")
        self._metrics.forget_job(namespace, name)
        self._set_state(key, None)

    def _set_state(self, key: str, state: str | None) -> None:
        with self._lock:
            before = self._states.pop(key, None)
            if state is not None:
                self._states[key] = state
            if before == state:
                return
            self._counts.update(filter(None, (state,)))
            self._counts.subtract(filter(None, (before,)))
            self._metrics.set_jobs(self._counts)


def state_of(status: Status) -> str:
    """Return the one state by which a job is counted."""
    told = status.first_true(*MOST_TELLING, ConditionType.READY)
    return told.type if told else "Pending"


def budgets_of(spec: JobSpec, status: Status, now: datetime) -> dict[str, tuple[int, int]]:
    """Return, by cause, the incidents within the budget's window and the budget's limit."""
    counts = {count.cause: count for count in status.incidents_by_cause}
    return {
        budget.cause: (
            len(counts[budget.cause].within(now, budget.window_seconds)) if budget.cause in counts else 0,
            budget.max_restarts,
        )
        for budget in spec.budgets
    }


def ratios_of(slow: Iterable[SlowRank]) -> dict[tuple[str, str, str], float]:
    """Return how many times the median rank's own time each slow rank uses, by rank, node and activity."""
    return {
        (str(one.rank), one.node, one.activity): round(one.seconds / one.median_seconds, 3)
        for one in slow
        if one.median_seconds > 0
    }
