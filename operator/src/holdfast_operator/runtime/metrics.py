"""The operator's metrics, in their own registry.

No counter has a label for the job, because counters live longer than jobs. ``forget_job`` removes the per-job gauges
when the job ends. ``docs/reference/metrics.md`` documents all names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from holdfast_operator.api.reasons import CAUSES, DecisionReason
from holdfast_operator.api.spec.preflight import CHECKS
from holdfast_operator.api.status import MOST_TELLING, ConditionType

_JOB_STATES = ("Pending", ConditionType.READY, *MOST_TELLING)
_RECOVERY_BUCKETS = (0.5, 1, 2, 5, 10, 15, 30, 45, 60, 120, 300, 600, 1800, 3600)
_RECONCILE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

# Name without the prefix ``holdfast_`` → help text and labels.
_GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "jobs": ("Jobs by state.", ("state",)),
    "workqueue_depth": ("Jobs that wait for a reconcile pass.", ()),
    "agent_long_polls": ("Long polls that are open now.", ()),
    "ca_expiration_timestamp_seconds": ("Unix time at which the CA in use expires.", ()),
    "full_list_timestamp_seconds": (
        "Unix time of the last complete list of jobs, pods and nodes; 0 before the first.",
        (),
    ),
    "job_workers_desired": ("Workers that the job requests.", ("namespace", "job_name")),
    "job_workers_ready": ("Workers that are training now.", ("namespace", "job_name")),
    "job_completed_step": ("Newest completed step.", ("namespace", "job_name")),
    "job_slow_rank_ratio": (
        "Own time per step of a slow rank, divided by that of the median rank; absent for other ranks.",
        ("namespace", "job_name", "rank", "node", "activity"),
    ),
    "job_restart_budget": ("Incidents that the budget allows within its window.", ("namespace", "job_name", "cause")),
    "job_incidents_in_window": ("Incidents within the window of the budget.", ("namespace", "job_name", "cause")),
    "leader": ("1 if this replica leads, 0 if it is on standby.", ()),
    "build_info": ("Version of this operator.", ("version",)),
}
_COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "incidents": ("Incidents, by cause.", ("cause",)),
    "recovery_decisions": (
        "Decisions about failures, by cause, action and reason.",
        ("cause", "action", "reason"),
    ),
    "incident_lost_steps": ("Completed steps that were lost and computed again, by cause.", ("cause",)),
    "replica_divergences": (
        "Ranks whose state differed from other replicas, by whether they received the state of the majority.",
        ("repaired",),
    ),
    "agent_requests": ("Requests to the agents' API, by route and status code.", ("route", "code")),
    "agent_reports_duplicate": ("Reports that were ignored because the same or a later one had arrived.", ()),
    "agent_report_entries_dropped": ("Entries of lists in reports that exceed the limit of the list.", ()),
    "preflight_checks": ("Results of preflight checks, by check and result.", ("check", "result")),
    "events_dropped": ("Events that were not written because the job exceeded its rate limit.", ()),
}
# The same, with buckets.
_HISTOGRAMS: Mapping[str, tuple[str, tuple[str, ...], tuple[float, ...]]] = {
    "incident_recovery_seconds": (
        "Time from the detection of an incident to the first step after it, by cause.",
        ("cause",),
        _RECOVERY_BUCKETS,
    ),
    "reconcile_duration_seconds": (
        "Duration of one reconcile pass over one job, by result (ok, conflict, error).",
        ("result",),
        _RECONCILE_BUCKETS,
    ),
    "workqueue_queue_duration_seconds": (
        "Time a job waited for its reconcile pass, without the requested delay.",
        (),
        _RECONCILE_BUCKETS,
    ),
}


class Metrics:
    """All metrics of one operator process. Thread-safe, as prometheus-client is."""

    def __init__(self, *, version: str = "unknown", process: bool = True) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        if process:
            ProcessCollector(registry=self.registry)
            PlatformCollector(registry=self.registry)
            GCCollector(registry=self.registry)
        self._gauges = {
            name: Gauge(f"holdfast_{name}", *how, registry=self.registry) for name, how in _GAUGES.items()
        }
        self._counters = {
            name: Counter(f"holdfast_{name}", *how, registry=self.registry) for name, how in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"holdfast_{name}", text, labels, buckets=buckets, registry=self.registry)
            for name, (text, labels, buckets) in _HISTOGRAMS.items()
        }
        self._slow_ranks: dict[tuple[str, str], frozenset[tuple[str, ...]]] = {}  # the label values with a series
        self._gauges["build_info"].labels(version).set(1)
        self._create_zero_series()

    def set_jobs(self, by_state: Mapping[str, int]) -> None:
        """Set the number of jobs in each state. A state that is not named has 0."""
        for state in {*_JOB_STATES, *by_state}:
            self._gauges["jobs"].labels(state).set(by_state.get(state, 0))

    def incident(self, cause: str) -> None:
        """Count one incident."""
        self._counters["incidents"].labels(cause).inc()

    def decided(self, cause: str, action: str, reason: str) -> None:
        """Count one decision about a failure. The labels are those of the event and the log line."""
        self._counters["recovery_decisions"].labels(cause, action, reason).inc()

    def recovered(self, cause: str, seconds: float, lost_steps: int = 0) -> None:
        """Record that training resumed after an incident."""
        self._histograms["incident_recovery_seconds"].labels(cause).observe(max(0.0, seconds))
        self._counters["incident_lost_steps"].labels(cause).inc(max(0, lost_steps))

    def diverged(self, ranks: int, *, repaired: bool) -> None:
        """Count ranks whose state differed from that of other replicas."""
        self._counters["replica_divergences"].labels(str(repaired).lower()).inc(ranks)

    def set_job(self, namespace: str, job: str, *, workers: int, ready: int, step: int | None) -> None:
        self._gauges["job_workers_desired"].labels(namespace, job).set(workers)
        self._gauges["job_workers_ready"].labels(namespace, job).set(ready)
        if step is not None:
            self._gauges["job_completed_step"].labels(namespace, job).set(step)

    def set_budgets(self, namespace: str, job: str, budgets: Mapping[str, tuple[int, int]]) -> None:
        """Set incidents and limit of each cause's budget. A cause without a budget has no series."""
        for cause in CAUSES:
            if cause in budgets:
                spent, allowed = budgets[cause]
                self._gauges["job_incidents_in_window"].labels(namespace, job, cause).set(spent)
                self._gauges["job_restart_budget"].labels(namespace, job, cause).set(allowed)
            else:
                self._forget_budget(namespace, job, cause)

    def set_slow_ranks(self, namespace: str, job: str, ratios: Mapping[tuple[str, str, str], float]) -> None:
        """Set the ratios of a job's slow ranks by rank, node and activity. Other ranks have no series."""
        gauge = self._gauges["job_slow_rank_ratio"]
        for gone in self._slow_ranks.pop((namespace, job), frozenset()) - ratios.keys():
            _remove(gauge, namespace, job, *gone)
        for labels, ratio in ratios.items():
            gauge.labels(namespace, job, *labels).set(ratio)
        if ratios:
            self._slow_ranks[namespace, job] = frozenset(ratios)

    def forget_job(self, namespace: str, job: str) -> None:
        """Remove the series of a job that ended or was deleted."""
        self.set_slow_ranks(namespace, job, {})
        for name in ("job_workers_desired", "job_workers_ready", "job_completed_step"):
            _remove(self._gauges[name], namespace, job)
        for cause in CAUSES:
            self._forget_budget(namespace, job, cause)

    def _forget_budget(self, namespace: str, job: str, cause: str) -> None:
        for name in ("job_incidents_in_window", "job_restart_budget"):
            _remove(self._gauges[name], namespace, job, cause)

    def reconciled(self, result: str, seconds: float) -> None:
        """Record one pass, by its result: ``ok``, ``conflict`` or ``error``."""
        self._histograms["reconcile_duration_seconds"].labels(result).observe(seconds)

    def queue_depth(self, depth: Callable[[], int]) -> None:
        """Set the function that returns the length of the queue at each scrape."""
        self._gauges["workqueue_depth"].set_function(depth)

    def queue_waited(self, seconds: float) -> None:
        """Record how long a job waited for its pass."""
        self._histograms["workqueue_queue_duration_seconds"].observe(max(0.0, seconds))

    def agent_request(self, route: str, code: int) -> None:
        """Count one response of the agents' API."""
        self._counters["agent_requests"].labels(route, str(code)).inc()

    def report_duplicate(self) -> None:
        """Count one report that had arrived before."""
        self._counters["agent_reports_duplicate"].inc()

    def report_entries_dropped(self, entries: int) -> None:
        """Count entries of one report that exceed the limits of their lists."""
        self._counters["agent_report_entries_dropped"].inc(entries)

    def preflight_checked(self, check: str, result: str) -> None:
        """Count one result of a preflight check."""
        self._counters["preflight_checks"].labels(check, result).inc()

    def events_dropped(self, number: int) -> None:
        """Count events that exceed a job's rate limit."""
        self._counters["events_dropped"].inc(number)

    def long_polls(self, held: int) -> None:
        self._gauges["agent_long_polls"].set(held)

    def listed(self, timestamp: float) -> None:
        """Set the time of the last complete list of jobs, pods and nodes."""
        self._gauges["full_list_timestamp_seconds"].set(timestamp)

    def ca_expires(self, timestamp: float) -> None:
        """Set the time at which the CA in use expires."""
        self._gauges["ca_expiration_timestamp_seconds"].set(timestamp)

    def leads(self) -> None:
        """Record that this replica leads."""
        self._gauges["leader"].set(1)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _create_zero_series(self) -> None:
        """Create series with the value 0. A rate misses the first event of a series that this event creates."""
        self.set_jobs({})
        for check in CHECKS:
            for result in ("Passed", "Failed"):
                self._counters["preflight_checks"].labels(check, result)
        for repaired in ("true", "false"):
            self._counters["replica_divergences"].labels(repaired)
        for cause in CAUSES:
            self._counters["incidents"].labels(cause)
            for reason in (DecisionReason.IN_PLACE_BY_DEFAULT, DecisionReason.RECREATE_POD_BY_DEFAULT):
                self._counters["recovery_decisions"].labels(cause, reason.action, reason)
            self._histograms["incident_recovery_seconds"].labels(cause)
            self._counters["incident_lost_steps"].labels(cause)


def _remove(gauge: Gauge, *labels: str) -> None:
    with contextlib.suppress(KeyError):
        gauge.remove(*labels)
