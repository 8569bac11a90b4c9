"""A worker leaves after an agreed checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_cluster import Pod
from simulation import Simulation

from holdfast.core.attempt import AttemptId
from holdfast.core.protocol import Cause
from holdfast.launcher.membership import events
from holdfast.launcher.membership.messages import Failure, Priority


def training(replicas: int = 3, **settings: object) -> Simulation:
    """A job whose workers are all training and have saved a checkpoint."""
    sim = Simulation(replicas, **settings)  # type: ignore[arg-type]
    names = [f"w{number}" for number in range(replicas)]
    assert sim.run(20, lambda: sim.trains_with(*names) and sim.committed() >= 2)
    return sim


def incident(pod: Pod, attempt_id: AttemptId) -> Cause:
    return next(i.failure.cause for i in pod.state.incidents if i.attempt_id == attempt_id)


def asked(until: float, cause: Cause | None = Cause.INTERRUPTION) -> events.DrainRequested:
    return events.DrainRequested(id="spot", reason="the machine goes", until=until, cause=cause)


def test_drained_pod_exits_75_after_an_agreed_checkpoint() -> None:
    """No step is lost."""
    sim = training(replace_lost=False)
    before = sim.training_now()
    assert before is not None
    sim.drain("w1")
    assert sim.run(15, lambda: sim.trains_with("w0", "w2"))
    assert sim.pods["w1"].exit_code == 75
    assert sim.training_now().base == before.steps  # type: ignore[union-attr]
    for uid in ("w0", "w2"):
        assert incident(sim.pods[uid], AttemptId(1, 1)) is Cause.INTERRUPTION


@pytest.mark.parametrize("by", ["w0", "w1"])
@pytest.mark.parametrize("also", ["", "w2"])
@pytest.mark.parametrize("blind", [False, True])
def test_drained_worker_stays_if_another_launcher_seems_lost(by: str, also: str, blind: bool) -> None:
    """The worker takes part in the next attempt, and leaves after the agreed checkpoint of that attempt."""
    sim = training(4, replace_lost=False)
    for uid in filter(None, ["w1", also]):
        sim.drain(uid)
    if blind:
        gone = Failure(cause=Cause.INFRASTRUCTURE, reason="PeerLost", message="", priority=Priority.PEER_LOST)
        sim.feed(sim.pods["w1"], events.RankFailed(attempt_id=AttemptId(1, 1), failure=gone))
    sim.miss(by, "w3")
    assert sim.run(15, lambda: sim.trains_with(*sorted({"w0", "w1", "w2", "w3"} - {"w1", also})))
    assert sim.pods["w1"].exit_code == 75
    agreed = [world for world in sim.trainings if "w1" in world.world.uids and world.quiesced and world.commit]
    assert [world.world.attempt_id for world in agreed] == [AttemptId(1, 2)]
    assert any(stored.lineage == agreed[0].steps for stored in sim.readable())
    causes = [incident(sim.pods["w0"], attempt_id) for attempt_id in (AttemptId(1, 1), AttemptId(1, 2))]
    assert causes == [Cause.INFRASTRUCTURE, Cause.INTERRUPTION]


@pytest.mark.parametrize(("cause", "seconds"), [(None, 5.0), (Cause.INTERRUPTION, 1.0)])
def test_order_or_close_deadline_does_not_wait_for_an_attempt(cause: Cause | None, seconds: float) -> None:
    """The order comes from the operator."""
    sim = training(replace_lost=False)
    sim.feed(sim.pods["w1"], asked(sim.now + seconds, cause))
    sim.miss("w1", "w2")
    sim.feed(sim.pods["w1"], events.Tick())
    assert sim.pods["w1"].state.leaving is not None


def test_operator_order_ends_the_wait_for_the_next_attempt() -> None:
    sim = training(2, replace_lost=False)
    sim.feed(sim.pods["w1"], asked(sim.now + 5.0))
    sim.crash("w0")
    assert sim.run(5, lambda: sim.pods["w1"].state.postponed is not None and sim.pods["w1"].state.attempt is None)
    sim.feed(sim.pods["w1"], asked(sim.now + 5.0, None))
    assert sim.pods["w1"].state.leaving is not None


def test_drained_worker_leaves_at_its_deadline_if_none_starts() -> None:
    """The next attempt never starts."""
    sim = training(2, min_replicas=2, replace_lost=False)
    sim.feed(sim.pods["w1"], asked(sim.now + 5.0))
    until = sim.now + 5.0
    sim.crash("w0")
    assert not sim.run(4, lambda: sim.pods["w1"].exit_code is not None)
    assert sim.run(2, lambda: sim.pods["w1"].exit_code == 75)
    assert sim.now <= until + 1.0


def test_last_worker_keeps_the_state_until_it_may_save() -> None:
    """The worker saves when the operator has published a generation without the lost worker."""
    sim = training(2, replace_lost=False)
    before = sim.training_now()
    assert before is not None
    sim.feed(sim.pods["w1"], asked(sim.now + 30.0))
    sim.crash("w0")
    sim.prove(sim.pods["w0"])
    assert sim.run(20, lambda: sim.pods["w1"].exit_code == 75)
    assert sim.committed() > len(before.steps), "no step is lost, and one was made for the commit"


def test_two_workers_on_a_noticed_node_leave_as_one_incident() -> None:
    sim = training(5, pods_per_node=2, replace_lost=False)
    before = sim.training_now()
    assert before is not None
    sim.notice("w2")
    sim.run(1.5)
    sim.notice("w3")  # its own sidecar reads it a moment later
    assert sim.run(15, lambda: sim.trains_with("w0", "w1", "w4"))
    assert [sim.pods[uid].exit_code for uid in ("w2", "w3")] == [75, 75]
    after = sim.training_now()
    assert after is not None
    assert after.world.attempt_id == AttemptId(1, 2)
    assert after.base == before.steps
    said = {
        (i.attempt_id, i.failure.cause, i.failure.message) for pod in sim.pods.values() for i in pod.state.incidents
    }
    assert said == {(AttemptId(1, 1), Cause.INTERRUPTION, "w2, w3 leave: node-1 goes")}


@pytest.mark.parametrize("shared", [True, False])
def test_drain_of_a_pod_does_not_affect_others_on_its_node(shared: bool) -> None:
    sim = training(3, pods_per_node=2 if shared else 1, replace_lost=False)
    sim.drain("w1") if shared else sim.notice("w1")
    assert sim.run(15, lambda: sim.trains_with("w0", "w2"))


def test_workers_on_nodes_without_a_name_are_no_neighbours() -> None:
    sim = Simulation(3, replace_lost=False)
    for pod in sim.pods.values():
        pod.node = ""
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w2") and sim.committed() >= 2)
    sim.notice("w1")
    assert sim.run(15, lambda: sim.trains_with("w0", "w2"))


@pytest.mark.parametrize("keeps", [True, False])
def test_late_drain_checkpoint_is_an_incident_and_may_lose_steps(keeps: bool) -> None:
    """Steps are lost only if no rank keeps the state."""
    sim = training(replace_lost=False, keeps=keeps)
    before = sim.training_now()
    assert before is not None
    assert sim.run(5, lambda: len(before.steps) > before.saved)
    until, made, saved = sim.now + 0.2, len(before.steps), before.saved
    sim.feed(sim.pods["w1"], events.DrainRequested(id="spot", reason="the machine goes", until=until))
    sim.tick(0.25)
    assert sim.run(15, lambda: sim.trains_with("w0", "w2"))
    sim.round()
    assert incident(sim.pods["w1"], AttemptId(1, 1)) is Cause.INTERRUPTION
    for uid in ("w0", "w2"):
        (known,) = sim.pods[uid].state.incidents
        assert (known.attempt_id, known.failure.cause) == (AttemptId(1, 1), Cause.INTERRUPTION)
        assert known.lost_steps == (0 if keeps else made - saved)


def test_a_lone_worker_that_drains_without_a_commit_says_so() -> None:
    sim = training(1, replace_lost=False)
    sim.feed(sim.pods["w0"], events.DrainRequested(id="spot", reason="the machine goes", until=sim.now))
    (known,) = sim.pods["w0"].state.incidents
    assert known.failure.cause is Cause.INTERRUPTION
    assert known.failure.step == len(sim.trainings[0].steps)


def test_the_coordinator_may_be_drained() -> None:
    sim = training(replace_lost=False)
    sim.drain("w0")
    assert sim.run(15, lambda: sim.trains_with("w1", "w2"))
    assert sim.pods["w0"].exit_code == 75


def test_a_lone_worker_that_is_drained_leaves_with_75() -> None:
    sim = training(1, replace_lost=False)
    sim.drain("w0")
    assert sim.run(15, lambda: sim.pods["w0"].exit_code == 75)


def test_a_drain_that_the_operator_ordered_is_no_incident() -> None:
    sim = training(replace_lost=False)
    sim.feed(sim.pods["w2"], events.DrainRequested(id="d", reason="scaled down", cause=None))
    assert sim.run(15, lambda: sim.trains_with("w0", "w1"))
    assert sim.pods["w2"].exit_code == 75
    assert sim.pods["w0"].state.incidents == ()


@pytest.mark.parametrize("hears", ["w1", "w2"])
def test_member_gone_after_its_drain_checkpoint_is_not_lost(hears: str) -> None:
    """Its launcher may report the checkpoint and its exit before our own rank reports to us."""
    sim = training(replace_lost=False)
    pod = sim.pods[hears]
    sim.feed(sim.pods["w2"], events.DrainRequested(id="d", reason="scaled down", cause=None))
    if hears != "w2":
        sim.feed(pod, events.Received(sender="w2", message=sim.pods["w2"].state.hello))
    gone = replace(sim.pods["w0"].state.hello, world=None, left=AttemptId(1, 1))
    sim.feed(pod, events.Received(sender="w0", message=gone))
    assert sim.run(15, lambda: sim.trains_with("w0", "w1"))
    assert [one.state.incidents for one in sim.pods.values()] == [(), (), ()]


@pytest.mark.parametrize("order", ["w0 w1 w2", "w2 w1 w0", "w1 w0 w2"])
@pytest.mark.parametrize("rounds_between", [0, 1])
def test_drained_workers_checkpoint_their_last_step_and_leave(order: str, rounds_between: int) -> None:
    """A suspended job: the document reaches its launchers one after the other."""
    sim = training(replace_lost=False)
    for uid in order.split():
        if sim.pods[uid].alive:
            sim.feed(sim.pods[uid], events.DrainRequested(id="drain-9", reason="the operator asked", cause=None))
        for _ in range(rounds_between):
            sim.round()
    assert sim.run(20, lambda: all(pod.exit_code == 75 for pod in sim.pods.values()))
    assert sim.committed() == max(len(world.steps) for world in sim.trainings), "no step is lost"
    assert all(pod.state.incidents == () for pod in sim.pods.values())


def test_early_exit_of_ranks_of_a_suspended_job_is_no_loss() -> None:
    """Before the first step there is nothing to save. The first launcher leaves at once, one of its ranks before
    the other."""
    sim = Simulation(3, replace_lost=False)
    assert sim.run(20, lambda: any(world.base is not None for world in sim.trainings))
    attempt_id = sim.trainings[-1].world.attempt_id
    first, *others = sim.pods.values()
    ordered = events.DrainRequested(id="drain-9", reason="the operator asked", cause=None)
    sim.feed(first, ordered)
    held, first.local = first.local, []
    sim.deliver_all()
    for pod in others:
        gone = Failure(cause=Cause.INFRASTRUCTURE, reason="PeerLost", message="", priority=Priority.PEER_LOST)
        sim.feed(pod, events.RankFailed(attempt_id=attempt_id, failure=gone))
    sim.tick(0.5)
    sim.deliver_all()
    first.local = held
    for pod in others:
        sim.feed(pod, ordered)
    assert sim.run(20, lambda: all(pod.exit_code == 75 for pod in sim.pods.values()))
    assert [pod.state.incidents for pod in sim.pods.values()] == [(), (), ()]
