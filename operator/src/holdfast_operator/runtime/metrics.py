"""What the operator exports to Prometheus, in a registry of its own.

No counter carries a job's name: counters live as long as the process, jobs do not. The few per-job gauges go
when their job ends (``forget_job``). Names and meanings are documented in ``docs/reference/metrics.md``.
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

from holdfast_operator.api import names as c
from holdfast_operator.api.reasons import CAUSES, DecisionReason
from holdfast_operator.api.spec.preflight import CHECKS

_JOB_STATES = ("Pending", *c.CONDITIONS)
_RECOVERY_BUCKETS = (0.5, 1, 2, 5, 10, 15, 30, 45, 60, 120, 300, 600, 1800, 3600)
_RECONCILE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

# Without the prefix ``holdfast_``: text and labels.
_GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "jobs": ("Jobs by state.", ("state",)),
    "queue_depth": ("Jobs that wait for a pass.", ()),
    "agent_polls_held": ("Long polls that are held now.", ()),
    "ca_expiry_seconds": ("Unix time at which the CA in use expires.", ()),
    "full_list_time_seconds": (
        "Unix time of the last complete list of jobs, pods and nodes; 0 before the first.",
        (),
    ),
    "job_workers": ("Workers that the job asks for.", ("namespace", "job")),
    "job_workers_ready": ("Workers that train now.", ("namespace", "job")),
    "job_committed_step": ("Newest committed step.", ("namespace", "job")),
    "job_restart_budget": ("Incidents that the job may have within the window.", ("namespace", "job", "cause")),
    "job_restarts_in_window": ("Incidents of the job within the window.", ("namespace", "job", "cause")),
    "leader": ("1 if this process leads, 0 if it stands by.", ()),
    "build_info": ("Version of this operator.", ("version",)),
}
_COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "restarts": ("Incidents counted, by cause.", ("cause",)),
    "recovery_decisions": (
        "Decisions about failures, 'nothing' included, by cause, action and reason.",
        ("cause", "action", "reason"),
    ),
    "incident_lost_steps": ("Committed steps that had to be made again, by cause.", ("cause",)),
    "agent_requests": ("Requests on the agents' API, by route and status code.", ("route", "code")),
    "agent_reports_repeated": ("Reports that were answered and not taken, as they or later ones were before.", ()),
    "agent_report_entries_unheard": ("Entries of reports' lists beyond those that are heard.", ()),
    "preflight_checks": ("Checks of workers' preflights that passed or failed, by check.", ("check", "result")),
    "events_left_out": ("Events of jobs that were not written, as the job had too many.", ()),
}
# The same with buckets.
_HISTOGRAMS: Mapping[str, tuple[str, tuple[str, ...], tuple[float, ...]]] = {
    "incident_recovery_seconds": (
        "Seconds from the detection of an incident to the first step after it, by cause.",
        ("cause",),
        _RECOVERY_BUCKETS,
    ),
    "reconcile_seconds": (
        "Seconds that one pass over one job took, by result (ok, conflict, error).",
        ("result",),
        _RECONCILE_BUCKETS,
    ),
    "queue_wait_seconds": (
        "Seconds that a job waited for its pass beyond the delay asked for.",
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
        self._gauges["build_info"].labels(version).set(1)
        self._known_from_the_start()

    def set_jobs(self, by_state: Mapping[str, int]) -> None:
        """Number of jobs in each state; states not named are 0."""
        for state in {*_JOB_STATES, *by_state}:
            self._gauges["jobs"].labels(state).set(by_state.get(state, 0))

    def restart(self, cause: str) -> None:
        self._counters["restarts"].labels(cause).inc()

    def decided(self, cause: str, action: str, reason: str) -> None:
        """It was decided what to do about a failure, in the words of event and log."""
        self._counters["recovery_decisions"].labels(cause, action, reason).inc()

    def recovered(self, cause: str, seconds: float, lost_steps: int = 0) -> None:
        """Training went on after an incident."""
        self._histograms["incident_recovery_seconds"].labels(cause).observe(max(0.0, seconds))
        self._counters["incident_lost_steps"].labels(cause).inc(max(0, lost_steps))

    def set_job(self, namespace: str, job: str, *, workers: int, ready: int, step: int | None) -> None:
        self._gauges["job_workers"].labels(namespace, job).set(workers)
        self._gauges["job_workers_ready"].labels(namespace, job).set(ready)
        if step is not None:
            self._gauges["job_committed_step"].labels(namespace, job).set(step)

    def set_budgets(self, namespace: str, job: str, budgets: Mapping[str, tuple[int, int]]) -> None:
        """By cause: incidents within its window, and how many it allows. A budget that is not named is no more."""
        for cause in CAUSES:
            if cause in budgets:
                spent, allowed = budgets[cause]
                self._gauges["job_restarts_in_window"].labels(namespace, job, cause).set(spent)
                self._gauges["job_restart_budget"].labels(namespace, job, cause).set(allowed)
            else:
                self._forget_budget(namespace, job, cause)

    def forget_job(self, namespace: str, job: str) -> None:
        """The job ended or is gone: its gauges go."""
        for name in ("job_workers", "job_workers_ready", "job_committed_step"):
            _remove(self._gauges[name], namespace, job)
        for cause in CAUSES:
            self._forget_budget(namespace, job, cause)

    def _forget_budget(self, namespace: str, job: str, cause: str) -> None:
        for name in ("job_restarts_in_window", "job_restart_budget"):
            _remove(self._gauges[name], namespace, job, cause)

    def reconciled(self, result: str, seconds: float) -> None:
        """One pass ended: ``ok``, ``conflict`` or ``error``."""
        self._histograms["reconcile_seconds"].labels(result).observe(seconds)

    def queue_depth(self, depth: Callable[[], int]) -> None:
        """Ask this, whenever somebody looks, how many jobs wait for a pass."""
        self._gauges["queue_depth"].set_function(depth)

    def queue_waited(self, seconds: float) -> None:
        """A job waited this long for its pass."""
        self._histograms["queue_wait_seconds"].observe(max(0.0, seconds))

    def agent_request(self, route: str, code: int) -> None:
        """An answer on the agents' API."""
        self._counters["agent_requests"].labels(route, str(code)).inc()

    def report_repeated(self) -> None:
        """A report that was taken before came again."""
        self._counters["agent_reports_repeated"].inc()

    def report_unheard(self, entries: int) -> None:
        """A report had so many entries in its lists beyond those that are heard."""
        self._counters["agent_report_entries_unheard"].inc(entries)

    def preflight_checked(self, check: str, result: str) -> None:
        """A check of a worker's preflight has passed or failed."""
        self._counters["preflight_checks"].labels(check, result).inc()

    def events_left_out(self, number: int) -> None:
        """A job had more events than are written of it."""
        self._counters["events_left_out"].inc(number)

    def polls_held(self, held: int) -> None:
        self._gauges["agent_polls_held"].set(held)

    def listed(self, timestamp: float) -> None:
        """Jobs, pods and nodes were listed completely."""
        self._gauges["full_list_time_seconds"].set(timestamp)

    def ca_expires(self, timestamp: float) -> None:
        """When the CA in use expires."""
        self._gauges["ca_expiry_seconds"].set(timestamp)

    def leads(self) -> None:
        """This process leads from now on."""
        self._gauges["leader"].set(1)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _known_from_the_start(self) -> None:
        """A rate over a series that appears with its first event misses that event."""
        self.set_jobs({})
        for check in CHECKS:
            for result in ("Passed", "Failed"):
                self._counters["preflight_checks"].labels(check, result)
        for cause in CAUSES:
            self._counters["restarts"].labels(cause)
            for reason in (DecisionReason.IN_PLACE_BY_DEFAULT, DecisionReason.RECREATE_POD_BY_DEFAULT):
                self._counters["recovery_decisions"].labels(cause, reason.action, reason)
            self._histograms["incident_recovery_seconds"].labels(cause)
            self._counters["incident_lost_steps"].labels(cause)


def _remove(gauge: Gauge, *labels: str) -> None:
    with contextlib.suppress(KeyError):
        gauge.remove(*labels)
