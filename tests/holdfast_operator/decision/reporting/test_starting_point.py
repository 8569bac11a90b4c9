"""A job says whether it went on from a checkpoint that was in its folder; and what other versions wrote is read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from sim import Make, Sim

from holdfast_operator.api.status import Status, operator_state
from holdfast_operator.reconcile.act import status_patch


def claim(sim: Sim, *, generation: int = 1, step: int = 0, attempt_id: dict[str, int] | None = None) -> None:
    """The coordinator's launcher reports that its attempt claimed the folder."""
    told = {
        "version": 1,
        "jobUID": "job-gpt",
        "publication": "p",
        "generation": generation,
        "attempt": 1,
        "fromStep": step,
        "fromPair": attempt_id,
    }
    for _, body in sim.heard.values():
        body["launcher"]["highestClaim"] = told
    sim.settle()


def words(sim: Sim) -> tuple[str, int, str]:
    reasons = {"ResumesFromCheckpoint", "StartedFromStepZero"}
    reason, message = next(event for event in reversed(sim.events) if event[0] in reasons)
    assert message == sim.status.origin.message
    return reason, sim.status.origin.step, message


def test_job_on_an_old_folder_reports_that_it_resumes(trained: Sim) -> None:
    assert trained.status.origin.attempt_id is None, "nothing is said before it is known"
    claim(trained, step=350, attempt_id={"generation": 7, "attempt": 2})
    reason, step, message = words(trained)
    assert (reason, step) == ("ResumesFromCheckpoint", 350)
    assert "step 350 in the job's folder" in message
    assert trained.body["status"]["startedFrom"]["step"] == 350


@pytest.mark.parametrize(
    ("resume", "says"), [("Always", "no checkpoint exists"), ("Never", "neither read nor deleted")]
)
def test_a_job_that_starts_from_nothing_says_why(make_sim: Make, resume: str, says: str) -> None:
    sim = make_sim(checkpoint={"volume": {"claimName": "c"}, "resume": resume})
    sim.run(60, until=lambda: sim.status.summary == "Training")
    claim(sim)
    reason, step, message = words(sim)
    assert (reason, step) == ("StartedFromStepZero", 0)
    assert says in message


def test_it_is_said_once_and_again_only_after_a_suspension(trained: Sim) -> None:
    claim(trained)
    trained.run(10)
    claim(trained, generation=1, step=9, attempt_id={"generation": 1, "attempt": 1})
    assert trained.status.origin.step == 0
    trained.body["spec"]["suspend"] = True
    trained.settle()
    trained.obey_drain()
    trained.run(60, until=lambda: trained.status.holds("Suspended"))
    trained.body["spec"]["suspend"] = False
    trained.run(60, until=lambda: trained.status.summary == "Training")
    assert trained.status.origin.attempt_id is None
    claim(trained, generation=2, step=40, attempt_id={"generation": 1, "attempt": 1})
    assert words(trained)[:2] == ("ResumesFromCheckpoint", 40)
    assert "resumes from the checkpoint of step 40" in words(trained)[2]


def test_status_of_an_older_version_is_converted(trained: Sim) -> None:
    """The first version knew no startedFrom and no Suspended; what it wrote is all that the next one has."""
    before = trained.names(), trained.status.membership.generation
    old = trained.body["status"]
    for field in ("startedFrom", "avoidedNodes"):
        old.pop(field, None)
    workers = operator_state.decode(old)["workers"]
    old["operatorState"] = operator_state.encode({"workers": [_sparse(worker) for worker in workers]})
    trained.restart_operator(grace=True)
    trained.run(60)
    assert (trained.names(), trained.status.membership.generation) == before
    assert trained.status.summary == "Training"
    assert trained.status.incident_count == 0


def _sparse(worker: dict[str, Any]) -> dict[str, Any]:
    kept = ("incarnation", "batch", "phase", "podUID", "node", "bootID", "since", "readyTime", "pair")
    return {key: value for key, value in worker.items() if key in kept}


def test_what_a_newer_version_wrote_survives_an_older_one(trained: Sim) -> None:
    newer = copy.deepcopy(trained.body["status"])
    newer["forecast"] = {"finishes": "tomorrow"}
    newer["membership"]["weather"] = "fair"
    trained.body["status"] = newer
    trained.end("gpt-w1", 137)
    trained.run(60, until=lambda: "gpt-w3" in trained.world_names())
    after = trained.body["status"]
    assert after["forecast"] == {"finishes": "tomorrow"}
    assert after["membership"]["weather"] == "fair"


def test_what_is_no_longer_so_is_removed(trained: Sim) -> None:
    before = trained.status.to_json()
    without = Status.from_json({**before, "progress": None}).to_json()
    assert status_patch(before, without) == {"progress": None}
