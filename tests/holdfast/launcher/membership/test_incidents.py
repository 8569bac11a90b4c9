"""What counts as an incident, and what each launcher reports about it."""

from __future__ import annotations

from dataclasses import replace

from simulated_cluster import Pod
from simulation import Simulation

from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.protocol import Cause
from holdfast.launcher.hang.stall_reports import Stall
from holdfast.launcher.membership import events
from holdfast.launcher.membership.messages import Priority
from holdfast.telemetry.activity import Activity


def training(replicas: int = 3, **settings: object) -> Simulation:
    """A job whose workers are all training and have saved a checkpoint."""
    sim = Simulation(replicas, **settings)  # type: ignore[arg-type]
    names = [f"w{number}" for number in range(replicas)]
    assert sim.run(20, lambda: sim.trains_with(*names) and sim.committed() >= 2)
    return sim


def incident(pod: Pod, attempt_id: AttemptId) -> Cause:
    return next(i.failure.cause for i in pod.state.incidents if i.attempt_id == attempt_id)


def test_a_lost_pod_is_one_incident_on_every_launcher() -> None:
    sim = training()
    sim.crash("w2")
    assert sim.run(5, lambda: sim.trains_with("w0", "w1"))
    assert sim.run(3) is False
    for uid in ("w0", "w1"):
        incidents = sim.pods[uid].state.incidents
        assert [i.attempt_id for i in incidents] == [AttemptId(1, 1)]
        assert incidents[0].failure.cause is Cause.INFRASTRUCTURE
        assert incidents[0].failure.pod == "w2"
        assert incidents[0].action == "Shrink"
        assert incidents[0].resumed is not None
        assert incidents[0].lost_steps is not None


def test_lost_steps_are_unknown_without_a_step_of_the_attempt() -> None:
    """No report states how far the failed attempt came."""
    sim = Simulation(1)
    here = sim.pods["w0"]
    assert sim.run(20, lambda: here.state.attempt is not None)
    sim.kill_rank("w0")
    assert sim.run(20, lambda: bool(here.state.incidents) and here.state.incidents[0].resumed is not None)
    assert [(known.failure.step, known.lost_steps) for known in here.state.incidents] == [(None, None)]


def test_attempt_ending_before_its_first_step_lost_no_steps() -> None:
    """The steps of the attempt before it are not counted again."""
    sim = training(replace_lost=False)
    sim.kill_rank("w2")
    here = sim.pods["w0"]
    assert sim.run(
        10, lambda: here.state.attempt is not None and here.state.attempt.world.attempt_id == AttemptId(1, 2)
    )
    assert here.state.attempt is not None
    assert here.state.attempt.step is None
    sim.crash("w2")
    assert sim.run(20, lambda: sim.trains_with("w0", "w1") and (t := sim.training_now()) is not None and t.made)
    assert sim.run(5, lambda: all(known.resumed is not None for known in here.state.incidents))
    assert [(known.attempt_id, known.lost_steps) for known in here.state.incidents] == [
        (AttemptId(1, 1), 0),
        (AttemptId(1, 2), 0),
    ]


def test_a_killed_rank_restarts_in_place_in_the_same_generation() -> None:
    sim = training()
    sim.kill_rank("w1")
    assert sim.run(5, lambda: (t := sim.training_now()) is not None and t.world.attempt_id == AttemptId(1, 2))
    assert sim.trains_with("w0", "w1", "w2") or sim.run(5, lambda: sim.trains_with("w0", "w1", "w2"))
    assert {pod.state.incidents[0].action for pod in sim.alive()} == {"InPlace"}


def test_ranks_stopped_for_a_known_claim_are_ended() -> None:
    """The job continues with the next attempt."""
    sim = training()
    before = sim.training_now()
    pod = sim.pods["w0"]
    assert before is not None
    assert pod.state.membership is not None
    claim = Claim(attempt_id=AttemptId(1, 7), job_uid="older", publication="p", from_step=0)
    pod.state = replace(pod.state, membership=replace(pod.state.membership, claims=(claim,)))
    sim.feed(pod, events.ForeignClaims(attempt_id=before.world.attempt_id, claims=(claim,)))
    assert pod.state.attempt is None
    assert pod.state.foreign == ()
    assert sim.run(20, lambda: (t := sim.training_now()) is not None and t.world.attempt_id > before.world.attempt_id)


def test_root_cause_is_the_exception_not_the_peers_missing_it() -> None:
    sim = training()
    for uid in ("w0", "w2"):
        sim.kill_rank(uid, Cause.INFRASTRUCTURE, Priority.PEER_LOST)
    sim.kill_rank("w1", Cause.APPLICATION, Priority.EXCEPTION)
    assert sim.run(10, lambda: (t := sim.training_now()) is not None and t.world.attempt_id == AttemptId(1, 2))
    assert {incident(pod, AttemptId(1, 1)) for pod in sim.alive()} == {Cause.APPLICATION}


def test_stalled_ranks_are_reported_to_the_others_at_once() -> None:
    """The report is also withdrawn at once."""
    sim = training()
    stall = Stall(
        attempt_id=AttemptId(1, 1), rank=1, activity=Activity.VOTE, step=9, silent=False, seconds=0.6, deadline=0.85
    )

    def heard() -> set[tuple[Stall, ...]]:
        hellos = [sim.pods[uid].state.peers["w1"].hello for uid in ("w0", "w2")]
        return {hello.stalls for hello in hellos if hello is not None}

    sim.feed(sim.pods["w1"], events.Stalled(stalls=(stall,)))
    assert sim.run(0.9, lambda: heard() == {(stall,)})
    sim.feed(sim.pods["w1"], events.Stalled(stalls=()))
    assert sim.run(0.9, lambda: heard() == {()})
    assert sim.trains_with("w0", "w1", "w2"), "nothing follows from it here"


def test_other_launchers_of_the_attempt_keep_stacks_after_a_hang() -> None:
    sim = training()
    found = events.HangFound(attempt_id=AttemptId(1, 1), message="rank 1 has been busy for 1.0 s")
    sim.feed(sim.pods["w1"], found)
    assert sim.run(0.9, lambda: all(sim.pods[uid].kept_stacks for uid in ("w0", "w2")))
    keep = events.KeepStacks(attempt_id=AttemptId(1, 1), message="rank 1 has been busy for 1.0 s")
    assert [sim.pods[uid].kept_stacks for uid in ("w0", "w1", "w2")] == [[keep], [], [keep]]
    sim.feed(sim.pods["w1"], replace(found, attempt_id=AttemptId(1, 0)))
    sim.run(0.9, lambda: False)
    assert [len(sim.pods[uid].kept_stacks) for uid in ("w0", "w2")] == [1, 1], "a hang of an attempt that is over"
    assert sim.trains_with("w0", "w1", "w2"), "nothing else follows from it"
