"""How long a job may be active, and how long it stays after its end."""

from __future__ import annotations

import pytest
from sim import Make, Sim

from holdfast_operator.decision.plan import DeleteJob


def training(sim: Sim) -> bool:
    return bool(sim.status.summary == "Training")


def test_a_job_whose_time_is_over_fails_and_its_workers_go(make_sim: Make) -> None:
    sim = make_sim(activeDeadlineSeconds=120)
    sim.run(60, until=lambda: training(sim))
    began = sim.status.start_time
    sim.run(120, until=lambda: sim.status.holds("Failed"))
    assert (sim.now - began).total_seconds() == pytest.approx(120, abs=2)
    assert sim.status.summary == "DeadlineExceeded"
    assert "120 s" in sim.status.condition("Failed").message
    sim.run(10)
    assert not sim.running()
    assert sim.status.incident_count == 0


def test_the_wait_for_capacity_counts(make_sim: Make) -> None:
    sim = make_sim(replicas=9, minimum=9, nodes=1, activeDeadlineSeconds=60)
    sim.run(90, until=lambda: sim.status.holds("Failed"))
    assert sim.status.summary == "DeadlineExceeded"


def test_suspension_resets_the_active_deadline(make_sim: Make) -> None:
    """A resumed job has its complete time."""
    sim = make_sim(activeDeadlineSeconds=120)
    sim.run(60, until=lambda: training(sim))
    sim.body["spec"]["suspend"] = True
    sim.settle()
    sim.obey_drain()
    sim.run(600)
    assert sim.status.holds("Suspended")
    sim.body["spec"]["suspend"] = False
    sim.run(100)
    assert training(sim)
    sim.run(60, until=lambda: sim.status.holds("Failed"))


def test_raised_deadline_counts(make_sim: Make) -> None:
    """The deadline is raised before it ends."""
    sim = make_sim(activeDeadlineSeconds=60)
    sim.run(40)
    sim.body["spec"]["activeDeadlineSeconds"] = 600
    sim.run(200)
    assert training(sim)


def test_ended_job_is_deleted_after_its_ttl(make_sim: Make) -> None:
    """It does not happen earlier."""
    sim = make_sim(ttlSecondsAfterFinished=300)
    sim.run(60, until=lambda: training(sim))
    sim.complete_at = sim.step + 3
    sim.run(30, until=lambda: sim.status.holds("Complete"))
    sim.run(290)
    assert "deletionTimestamp" not in sim.body["metadata"]
    assert 0 < sim.plan().requeue_after <= 10, "nothing else would wake it"
    sim.run(20, until=lambda: "deletionTimestamp" in sim.body["metadata"])
    assert not sim.plan().actions


def test_at_zero_it_goes_once_nothing_of_it_runs(make_sim: Make, final_exit: str) -> None:
    sim = make_sim(ttlSecondsAfterFinished=0)
    sim.run(60, until=lambda: training(sim))
    sim.end("gpt-w0", 1, message=final_exit)
    sim.run(60, until=lambda: sim.status.holds("Failed"))
    assert sim.running(), "the others were still there"
    sim.run(60, until=lambda: "deletionTimestamp" in sim.body["metadata"])
    assert not sim.running()


def test_without_it_a_job_stays(trained: Sim) -> None:
    trained.complete_at = trained.step + 3
    trained.run(30, until=lambda: trained.status.holds("Complete"))
    trained.now = trained.now.replace(year=trained.now.year + 5)
    assert not [action for action in trained.plan().actions if isinstance(action, DeleteJob)]


@pytest.fixture
def final_exit() -> str:
    from pathlib import Path

    return (Path(__file__).parents[3] / "contract" / "termination.json").read_text()
