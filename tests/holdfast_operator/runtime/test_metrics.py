"""What the operator exports: documented names, no job's name on a counter, nothing left of a job that ended."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from holdfast_operator.runtime.metrics import Metrics


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return samples(metrics).get((name, frozenset(labels.items())))


def test_incidents_are_counted_by_cause_from_zero() -> None:
    metrics = Metrics(process=False)
    assert value(metrics, "holdfast_incidents_total", cause="Infrastructure") == 0
    metrics.incident("Infrastructure")
    assert value(metrics, "holdfast_incidents_total", cause="Infrastructure") == 1
    assert value(metrics, "holdfast_incidents_total", cause="Application") == 0


def test_a_recovery_is_timed_and_its_lost_steps_are_counted() -> None:
    metrics = Metrics(process=False)
    metrics.recovered("OOM", 4.0, lost_steps=12)
    assert value(metrics, "holdfast_incident_recovery_seconds_sum", cause="OOM") == 4.0
    assert value(metrics, "holdfast_incident_recovery_seconds_bucket", cause="OOM", le="5.0") == 1
    assert value(metrics, "holdfast_incident_lost_steps_total", cause="OOM") == 12


def test_divergences_are_counted_by_outcome_from_zero() -> None:
    metrics = Metrics(process=False)
    metrics.diverged(2, repaired=True)
    counts = [value(metrics, "holdfast_replica_divergences_total", repaired=word) for word in ("true", "false")]
    assert counts == [2, 0]


def test_a_clock_that_went_back_does_not_break_counters() -> None:
    metrics = Metrics(process=False)
    metrics.recovered("OOM", -3.0, lost_steps=-1)
    metrics.queue_waited(-1.0)
    assert value(metrics, "holdfast_incident_recovery_seconds_sum", cause="OOM") == 0


def test_states_without_a_job_are_zero_again() -> None:
    metrics = Metrics(process=False)
    metrics.set_jobs({"Ready": 2, "Suspended": 1})
    metrics.set_jobs({"Complete": 2})
    assert value(metrics, "holdfast_jobs", state="Ready") == 0
    assert value(metrics, "holdfast_jobs", state="Suspended") == 0
    assert value(metrics, "holdfast_jobs", state="Complete") == 2


def test_a_job_that_ended_leaves_no_series() -> None:
    metrics = Metrics(process=False)
    before = set(samples(metrics))
    metrics.set_job("ml", "gpt", workers=3, ready=2, step=412)
    metrics.set_budgets("ml", "gpt", {"Application": (1, 3), "OOM": (0, 2)})
    metrics.set_slow_ranks("ml", "gpt", {("2", "node-3", "compute"): 3.5})
    assert value(metrics, "holdfast_job_workers_ready", namespace="ml", job_name="gpt") == 2
    metrics.forget_job("ml", "gpt")
    metrics.forget_job("ml", "gpt")
    assert set(samples(metrics)) == before


def test_a_rank_that_is_slow_no_longer_leaves_no_series() -> None:
    metrics = Metrics(process=False)
    metrics.set_slow_ranks("ml", "gpt", {("2", "node-3", "compute"): 3.5, ("4", "node-1", "data"): 2.0})
    metrics.set_slow_ranks("ml", "gpt", {("2", "node-3", "compute"): 4.0})
    slow = {name: found for name, found in samples(metrics).items() if name[0] == "holdfast_job_slow_rank_ratio"}
    assert list(slow.values()) == [4.0]


def test_a_budget_that_the_job_no_longer_has_leaves_no_series() -> None:
    metrics = Metrics(process=False)
    metrics.set_budgets("ml", "gpt", {"Application": (1, 3), "OOM": (0, 2)})
    metrics.set_budgets("ml", "gpt", {"OOM": (1, 2)})
    assert value(metrics, "holdfast_job_restart_budget", namespace="ml", job_name="gpt", cause="OOM") == 2
    assert value(metrics, "holdfast_job_incidents_in_window", namespace="ml", job_name="gpt", cause="OOM") == 1
    assert value(metrics, "holdfast_job_restart_budget", namespace="ml", job_name="gpt", cause="Application") is None


def test_no_counter_or_histogram_has_a_jobs_name() -> None:
    metrics = Metrics(process=False)
    metrics.set_job("ml", "gpt", workers=3, ready=2, step=412)
    families = text_string_to_metric_families(metrics.render().decode())
    named = {
        f.name for f in families for s in f.samples if {"job", "job_name"} & s.labels.keys() and f.type != "gauge"
    }
    assert named == set()


def test_every_name_of_ours_begins_with_holdfast() -> None:
    metrics = Metrics(process=False)
    assert {name.partition("_")[0] for name, _labels in samples(metrics)} == {"holdfast"}


def test_two_operators_in_one_process_do_not_share_a_registry() -> None:
    first, second = Metrics(process=False), Metrics(process=False)
    first.reconciled("ok", 0.1)
    assert value(second, "holdfast_reconcile_duration_seconds_count", result="ok") is None
    assert isinstance(first.registry, CollectorRegistry)
    assert first.registry is not second.registry
