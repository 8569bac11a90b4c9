"""What a user reads of a job whose workers train while something else is wrong."""

from __future__ import annotations

from sim import Sim

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


def test_unreadable_checkpoint_reports_are_ignored(trained: Sim) -> None:
    trained.failing = {"shared": {"since": "soon", "cause": ["Full"]}}
    trained.run(5)
    assert trained.status.summary == "Training"
