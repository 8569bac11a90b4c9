"""What passes over a job export, and that nothing of a job stays when it has ended or is gone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sim import Sim

from holdfast_operator.cluster.agent_hub import AgentHub
from holdfast_operator.cluster.cache import Cache
from holdfast_operator.decision.plan import Plan
from holdfast_operator.errors import ClusterError
from holdfast_operator.reconcile.act import Actor
from holdfast_operator.reconcile.job_memories import JobMemory
from holdfast_operator.reconcile.observe import JobObserver
from holdfast_operator.reconcile.reconciler import Outcome, Reconciler
from holdfast_operator.runtime.metrics import Metrics

KEY = "ml/gpt"
Job = dict[str, Any]


class Seen:
    """Stands in for observer and actor: a simulated cluster, until it is deleted."""

    def __init__(self, sim: Sim) -> None:
        self.sim, self.deleted = sim, False
        self.failure: ClusterError | None = None

    def cached(self, *_arguments: object) -> Any:
        return None if self.deleted else self.sim.observe()

    live = cached

    def write_status(self, _job: object, plan: Plan) -> None:
        self.sim.apply(plan)

    def act(self, _job: object, _plan: Plan, memory: JobMemory) -> tuple[JobMemory, ClusterError | None]:
        return memory, self.failure

    def granted(self, _job: object, events: Any, _now: object) -> Any:
        return events

    def tell(self, *_arguments: object) -> None:
        """Events are not what this is about."""


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(process=False)


@pytest.fixture
def passes(trained: Sim, metrics: Metrics) -> tuple[Seen, Callable[[], Outcome]]:
    """A training job, and a pass over it."""
    seen = Seen(trained)
    reconciler = Reconciler(
        observer=cast(JobObserver, seen),
        actor=cast(Actor, seen),
        cache=Cache(),
        hub=AgentHub(lambda _token: None, lambda _uid: None),
        metrics=metrics,
        clock=lambda: trained.now,
    )
    return seen, lambda: reconciler.run(KEY)


def of_jobs(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Name and cause → value, of the series that name the job."""
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [sample for family in families for sample in family.samples if sample.labels.get("job_name") == "gpt"]
    return {(sample.name, sample.labels.get("cause", "")): sample.value for sample in samples}


def test_a_training_job_has_its_gauges_and_its_budget(passes, metrics):
    seen, run = passes
    seen.sim.run(5)
    run()
    found = of_jobs(metrics)
    assert found.pop(("holdfast_job_completed_step", "")) > 0
    assert found == {
        ("holdfast_job_workers_desired", ""): 3,
        ("holdfast_job_workers_ready", ""): 3,
        ("holdfast_job_restart_budget", "Application"): 3,
        ("holdfast_job_incidents_in_window", "Application"): 0,
    }


def test_incident_counts_until_the_window_of_the_budget_ends(passes, metrics):
    seen, run = passes
    seen.sim.body["spec"]["recovery"] = {"budgets": [{"cause": "Infrastructure", "maxRestarts": 5}]}
    seen.sim.kill_node(seen.sim.node_of("gpt-w1"))
    seen.sim.run(60, until=lambda: seen.sim.status.incident_count == 1)
    run()
    assert of_jobs(metrics)["holdfast_job_incidents_in_window", "Infrastructure"] == 1
    seen.sim.body["spec"]["recovery"]["budgets"][0]["windowSeconds"] = 1
    seen.sim.tick(5)
    run()
    assert of_jobs(metrics)["holdfast_job_incidents_in_window", "Infrastructure"] == 0


def test_a_suspended_job_asks_for_no_workers(passes, metrics):
    seen, run = passes
    seen.sim.body["spec"]["suspend"] = True
    run()
    assert of_jobs(metrics)["holdfast_job_workers_desired", ""] == 0


def test_a_job_that_completed_leaves_no_series(passes, metrics):
    seen, run = passes
    run()
    seen.sim.complete_at = seen.sim.step + 2
    seen.sim.run(60, until=lambda: seen.sim.status.terminal)
    run()
    assert of_jobs(metrics) == {}


def test_decisions_are_reported_if_an_action_fails(passes, metrics):
    """The status is written, so no later pass would tell it."""
    seen, run = passes
    seen.sim.notice("gpt-w1")
    seen.sim.report()
    seen.failure = ClusterError("POST …/pods was answered with 500: failed calling webhook")
    outcome = run()
    assert outcome.failure is seen.failure
    assert outcome.tell is not None


def test_a_job_that_was_deleted_leaves_no_series(passes, metrics):
    seen, run = passes
    run()
    seen.deleted = True
    run()
    assert of_jobs(metrics) == {}


def test_progress_is_passed_on_without_reading_anything_anew(
    passes: tuple[Seen, Callable[[], Outcome]], trained: Sim
) -> None:
    seen, run = passes
    run()
    read: list[object] = []
    seen.live = lambda *given: read.append(given) or seen.cached()  # type: ignore[method-assign,func-returns-value]
    before = trained.status.progress.step
    trained.now += timedelta(seconds=30)
    trained.step += 100
    trained.report()
    run()
    assert trained.status.progress.step == before + 100
    assert not read
    trained.end("gpt-w1", 1)
    run()
    assert read, "what is done to pods is done on their newest state"


def test_events_are_left_for_when_the_job_is_free_again(
    passes: tuple[Seen, Callable[[], Outcome]], trained: Sim
) -> None:
    seen, run = passes
    run()
    told: list[object] = []
    seen.tell = lambda *given: told.append(given)  # type: ignore[method-assign]
    trained.delete(trained.uid("gpt-w1"))
    outcome = run()
    assert not told
    assert outcome.tell is not None
    outcome.tell()
    assert told
