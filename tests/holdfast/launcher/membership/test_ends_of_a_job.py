"""A job ends when all ranks are done, or when a budget is spent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_cluster import Pod
from simulation import Simulation

from holdfast.core.attempt import AttemptId
from holdfast.core.protocol import Cause
from holdfast.launcher.membership import events
from holdfast.launcher.membership.document import Budget
from holdfast.launcher.membership.messages import Priority


def training(replicas: int = 3, **settings: object) -> Simulation:
    """A job whose workers are all training and have saved a checkpoint."""
    sim = Simulation(replicas, **settings)  # type: ignore[arg-type]
    names = [f"w{number}" for number in range(replicas)]
    assert sim.run(20, lambda: sim.trains_with(*names) and sim.committed() >= 2)
    return sim


def incident(pod: Pod, attempt_id: AttemptId) -> Cause:
    return next(i.failure.cause for i in pod.state.incidents if i.attempt_id == attempt_id)


def _fail_twice(first: str, second: str, *, step_between: bool = False, **settings: object) -> Simulation:
    """Fail the script in two consecutive attempts. The settings allow a hundred failures."""
    budget = Budget(cause=Cause.APPLICATION, max_restarts=100, window=3600.0)
    sim = training(budgets=(budget,), replace_lost=False, **settings)
    before = sim.trainings[-1].world.attempt_id

    def tries_again() -> bool:
        now = sim.training_now()
        return now is not None and now.world.attempt_id > before and bool(now.made) is step_between

    sim.kill_rank("w1", Cause.APPLICATION, Priority.EXCEPTION, mistake=first)
    assert sim.run(10, tries_again)
    sim.kill_rank("w1", Cause.APPLICATION, Priority.EXCEPTION, mistake=second)
    sim.run(10, lambda: not sim.alive())
    return sim


def test_completion_is_reported_when_all_are_done_and_exit_0() -> None:
    sim = training(last_step=6)
    assert sim.run(20, lambda: all(pod.exit_code == 0 for pod in sim.pods.values()))
    assert len(sim.announced) == 1
    assert all(pod.state.exit.final for pod in sim.pods.values() if pod.state.exit)


def test_rank_that_finishes_first_is_no_failure() -> None:
    """The rank restarts if another rank fails afterwards."""
    sim = training()
    attempt = sim.training_now()
    assert attempt is not None
    sim.feed(sim.pods["w0"], events.LocalDone(attempt_id=attempt.world.attempt_id))
    sim._end_ranks(sim.pods["w0"])
    attempt.finished.add("w0")
    sim.run(3)
    assert sim.pods["w0"].state.incidents == ()
    assert not sim.announced

    sim.kill_rank("w1")
    assert sim.run(10, lambda: (t := sim.training_now()) is not None and t.world.attempt_id == AttemptId(1, 2))
    assert sim.run(5, lambda: sim.trains_with("w0", "w1", "w2"))


def test_rank_that_ends_early_is_an_application_failure() -> None:
    """The other ranks still need that rank."""
    sim = training()
    attempt = sim.training_now()
    assert attempt is not None
    sim.feed(sim.pods["w0"], events.LocalDone(attempt_id=attempt.world.attempt_id))
    sim._end_ranks(sim.pods["w0"])
    sim.run(1)
    sim.kill_rank("w1", Cause.INFRASTRUCTURE, Priority.PEER_LOST)
    assert sim.run(10, lambda: (t := sim.training_now()) is not None and t.world.attempt_id == AttemptId(1, 2))
    assert incident(sim.pods["w1"], AttemptId(1, 1)) is Cause.APPLICATION


def test_spent_budget_ends_the_job_on_all_launchers() -> None:
    """The exit code is that of the application."""
    budget = Budget(cause=Cause.APPLICATION, max_restarts=1, window=3600.0)
    sim = training(budgets=(budget,), replace_lost=False)
    sim.kill_rank("w1", Cause.APPLICATION, Priority.EXCEPTION)
    assert sim.run(
        10, lambda: (t := sim.training_now()) is not None and t.world.attempt_id == AttemptId(1, 2) and t.made
    )
    sim.kill_rank("w1", Cause.APPLICATION, Priority.EXCEPTION)
    assert sim.run(10, lambda: not sim.alive())
    assert {pod.exit_code for pod in sim.pods.values()} == {1}
    assert {pod.state.exit.final for pod in sim.pods.values() if pod.state.exit} == {True}


def test_restarts_before_the_launchers_started_count_against_the_budget() -> None:
    """The operator counted them: the launchers that had them were replaced."""
    budget = Budget(cause=Cause.APPLICATION, max_restarts=1, window=3600.0)
    sim = training(budgets=(budget,), replace_lost=False)
    for pod in sim.alive():
        document = replace(sim.document(), revision=100, restarts={Cause.APPLICATION: 1})
        sim.feed(pod, events.MembershipSeen(membership=document))
    sim.kill_rank("w1", Cause.APPLICATION, Priority.EXCEPTION)
    assert sim.run(10, lambda: not sim.alive())


def test_failure_of_another_cause_spends_no_budget_of_this_one() -> None:
    sim = training(budgets=(Budget(cause=Cause.APPLICATION, max_restarts=1, window=3600.0),), replace_lost=False)
    for cause in (Cause.INFRASTRUCTURE, Cause.APPLICATION):
        ended = sim.trainings[-1]
        sim.kill_rank("w1", cause, Priority.EXCEPTION)
        assert sim.run(10, lambda ended=ended: sim.training_now() not in (None, ended))  # type: ignore[misc]
        assert sim.run(10, lambda: sim.trains_with("w0", "w1", "w2"))


def test_same_error_without_a_step_ends_the_job_at_once() -> None:
    sim = _fail_twice("NameError at train.py:7", "NameError at train.py:7")
    assert {pod.exit_code for pod in sim.pods.values()} == {1}
    assert all(pod.state.exit.final and "the same error" in pod.state.exit.message for pod in sim.pods.values())


@pytest.mark.parametrize(
    ("first", "second", "step_between"),
    [
        ("NameError at train.py:7", "NameError at train.py:8", False),
        ("", "", False),  # a failure that a restart may fix
        ("ValueError at train.py:7", "ValueError at train.py:7", True),
    ],
)
def test_any_other_failure_again_is_left_to_the_budget(first: str, second: str, step_between: bool) -> None:
    assert _fail_twice(first, second, step_between=step_between).alive()


def test_attempts_that_fail_before_their_first_step_back_off() -> None:
    sim = Simulation(1)
    started = set()
    for _ in range(40):
        sim.round()
        started |= {training.world.attempt_id for training in sim.trainings}
        sim.kill_rank("w0")
    assert 2 <= len(started) <= 10
