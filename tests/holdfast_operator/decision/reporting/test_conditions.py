"""What a user reads of a job whose workers train while something else is wrong."""

from __future__ import annotations

import pytest
from sim import Make, Sim

from holdfast_operator.reconcile.job_metrics import ratios_of

FULL = {
    "since": "2026-01-31T12:00:00.000000Z",
    "commits": 1,
    "cause": "Full",
    "message": "rank 1: [Errno 28] No space left on device: 'rank-1.safetensors'",
}


def test_failing_volume_is_reported_until_a_checkpoint(trained: Sim) -> None:
    sim = trained
    sim.checkpoints = {"shared": {"step": 300, "generation": 1, "attempt": 1, "time": "2026-01-31T11:50:00Z"}}
    sim.failing = {"shared": FULL}
    sim.run(5)
    assert sim.status.summary == "CheckpointsFailing"
    assert sim.status.holds("Ready"), "all workers train"
    assert sim.status.condition("Degraded").message == (
        "No checkpoint could be written since 2026-01-31T12:00:00Z (Full): rank 1: [Errno 28] No space left on "
        "device: 'rank-1.safetensors'. Training continues, but resumes from step 300 if all workers are lost: free "
        "space on the checkpoint volume"
    )
    sim.failing = {"shared": {**FULL, "commits": 9}}
    sim.run(60)
    assert [reason for reason, _ in sim.events].count("CheckpointsFailing") == 1
    sim.failing = {}
    sim.run(5)
    assert (sim.status.summary, sim.status.holds("Degraded")) == ("Training", False)


def test_condition_is_stable_if_launchers_disagree(trained: Sim) -> None:
    sim = trained
    first, second, third = sorted(body["metadata"]["name"] for body in sim.pods.values())
    later = {**FULL, "since": "2026-01-31T12:10:00.000000Z", "message": "another file"}
    sim.failing_of = {first: {"shared": later}, second: {}, third: {"shared": FULL}}
    messages = set()
    for _ in range(20):
        sim.step += 10
        sim.run(1)
        messages.add(sim.status.condition("Degraded").message)
    assert [reason for reason, _ in sim.events].count("CheckpointsFailing") == 1
    assert all("since 2026-01-31T12:00:00Z" in message for message in list(messages)[1:]), messages
    assert len(messages) <= 2, "that of before, and this one"


def test_what_helps_is_told_by_the_cause(trained: Sim) -> None:
    trained.failing = {"shared": {**FULL, "cause": "NonFinite"}}
    trained.run(5)
    assert trained.status.condition("Degraded").message.endswith("step that made a weight infinite or NaN")


STORE = {"object": {"url": "s3://b/p"}}


@pytest.mark.parametrize(
    ("cause", "fix"),
    [
        ("Full", "free space in the object store, or raise its quota"),
        ("Credentials", "renew the credentials in the secret of checkpoint.object"),
        ("NonFinite", "find the step that made a weight infinite or NaN"),
        ("Server", "check the object store and the network"),
    ],
)
def test_fix_for_a_job_without_a_volume_names_the_object_store(make_sim: Make, cause: str, fix: str) -> None:
    sim = make_sim(checkpoint=STORE)
    sim.run(60, until=lambda: sim.status.summary == "Training")
    sim.failing = {"shared": {**FULL, "cause": cause}}
    sim.run(5)
    assert sim.status.condition("Degraded").message.endswith(fix)


@pytest.mark.parametrize(
    ("checkpoint", "lost"), [({}, True), (STORE, False), ({"volume": {"claimName": "c"}}, False)], ids=str
)
def test_job_without_volume_and_object_store_reports_that_checkpoints_are_lost(
    make_sim: Make, checkpoint: dict[str, object], lost: bool
) -> None:
    sim = make_sim(checkpoint=checkpoint)
    sim.run(60, until=lambda: sim.status.summary == "Training")
    says = "neither checkpoint.volume nor checkpoint.object is set; checkpoints are lost with the pods"
    assert (says in sim.status.condition("Ready").message) == lost


def test_checkpoint_alone_makes_no_revision(trained: Sim) -> None:
    """The next generation contains the newest checkpoint."""
    sim, revision = trained, trained.document["revision"]
    sim.checkpoints = {"shared": {"step": 300, "generation": 1, "attempt": 1, "time": "2026-01-31T11:50:00Z"}}
    sim.run(5)
    assert sim.status.last_checkpoint.step == 300
    assert sim.document["revision"] == revision
    sim.kill_node("node-1")
    sim.run(400, until=lambda: sim.document["generation"] == 2)
    assert sim.document["durableStep"] == 300


def test_node_local_tiers_are_no_failing_checkpoint(trained: Sim) -> None:
    trained.failing = {"memory": FULL, "local": FULL}
    trained.run(5)
    assert trained.status.summary == "Training"


def test_slow_ranks_are_named_until_they_are_not_slow(trained: Sim) -> None:
    sim = trained
    sim.slow_ranks = [
        {"rank": 2, "pod": "gpt-w2", "node": "node-3", "seconds": 0.41, "medianSeconds": 0.12, "activity": "compute"}
    ]
    sim.run(5)
    assert (sim.status.summary, sim.status.holds("Ready")) == ("SlowRanks", True)
    assert sim.status.condition("Degraded").message == (
        "Training waits for slow ranks: rank 2 (gpt-w2 on node-3) uses 0.41 s per step for itself, mostly for "
        "compute (the median rank uses 0.12 s)"
    )
    sim.run(60)
    assert [reason for reason, _ in sim.events].count("SlowRanks") == 1
    sim.failing = {"shared": FULL}
    sim.run(5)
    assert sim.status.summary == "CheckpointsFailing", "a failure is more urgent"
    sim.failing, sim.slow_ranks = {}, []
    sim.run(5)
    assert (sim.status.summary, sim.status.holds("Degraded")) == ("Training", False)


def test_slow_rank_is_on_the_node_of_its_pod_whatever_the_launcher_says(trained: Sim) -> None:
    """An alert may drain this node."""
    one = {"seconds": 0.41, "medianSeconds": 0.1, "activity": "compute"}
    node = next(worker.node for worker in trained.status.workers if worker.incarnation == 2)
    trained.slow_ranks = [
        {"rank": 2, "pod": "gpt-w2", "node": "another-node", **one},
        {"rank": 3, "pod": "no-pod-of-this-job", "node": node, **one},
    ]
    trained.run(5)
    slow = trained.plan().slow_ranks
    assert [(found.rank, found.node) for found in slow] == [(2, node)]
    assert ratios_of(slow) == {("2", node, "compute"): 4.1}


def test_many_slow_ranks_are_counted(trained: Sim) -> None:
    one = {"pod": "gpt-w2", "node": "node-3", "seconds": 0.41, "medianSeconds": 0.12, "activity": "data"}
    trained.slow_ranks = [{"rank": rank, **one} for rank in range(40)]
    trained.run(5)
    assert trained.status.condition("Degraded").message.endswith("; 13 more are slow")


def test_unreadable_slow_ranks_are_ignored(trained: Sim) -> None:
    trained.slow_ranks = [{"rank": "two"}, {"rank": None}, {}]
    trained.run(5)
    assert trained.status.summary == "Training"


def test_unreadable_checkpoint_reports_are_ignored(trained: Sim) -> None:
    trained.failing = {"shared": {"since": "soon", "cause": ["Full"]}}
    trained.run(5)
    assert trained.status.summary == "Training"
