"""A job is complete with one launcher's exit 0, and gives up its pods."""

from __future__ import annotations

from datetime import datetime, timedelta

from sim import Sim

from holdfast_operator.decision.decide import decide
from holdfast_operator.decision.plan import DeletePod
from holdfast_operator.decision.snapshot import Observed


def test_one_launchers_exit_0_completes_the_job(trained: Sim) -> None:
    trained.complete_at = trained.step + 5
    trained.run(60, until=lambda: trained.status.holds("Complete"))
    trained.delete(trained.uid("gpt-w1"))
    trained.run(120)
    assert trained.status.summary == "Completed"
    assert trained.created_names == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert trained.status.incident_count == 0


def side_containers_run_on(sim: Sim) -> None:
    """A container beside the trainer never ends, so the kubelet never calls the pod finished."""
    for body in sim.pods.values():
        if "containerStatuses" in body["status"]:
            body["status"]["phase"] = "Running"


def deleted(seen: Observed, now: datetime) -> list[str]:
    return [action.name for action in decide(seen, now).actions if isinstance(action, DeletePod)]


def test_a_side_container_keeps_no_pod_of_a_complete_job(trained: Sim) -> None:
    trained.complete_at = trained.step + 5
    trained.run(60, until=lambda: trained.status.holds("Complete"))
    trained.run(5)
    side_containers_run_on(trained)
    seen = trained.observe()
    assert deleted(seen, trained.now) == [], "the sidecar ends shortly after the trainer"
    assert deleted(seen, trained.now + timedelta(seconds=60)) == ["gpt-w0", "gpt-w1", "gpt-w2"]


def test_a_side_container_keeps_no_gpu_of_a_lost_worker(trained: Sim) -> None:
    trained.end("gpt-w1", 137)
    side_containers_run_on(trained)
    trained.run(120, until=lambda: "gpt-w1" not in trained.names())
    assert "gpt-w1" not in trained.names()
    assert not trained.status.terminal


def test_an_ended_pod_stays_for_its_log_while_the_job_trains(trained: Sim) -> None:
    trained.end("gpt-w1", 137)
    trained.run(120)
    assert "gpt-w1" in trained.names()
