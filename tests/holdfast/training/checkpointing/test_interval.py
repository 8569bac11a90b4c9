"""The interval `Auto` is optimal and follows the measurements, and all ranks save the same step."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.checkpoint.policy.interval import (
    FIRST_SECONDS,
    LEAST_SECONDS,
    MOST_RETRY_SECONDS,
    MOST_SECONDS,
    Failures,
    IntervalChooser,
    LauncherFailures,
    optimum,
    retry_after,
)
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.restore.search import restore
from holdfast.training.checkpointing import scheduler
from holdfast.training.checkpointing.scheduler import CheckpointScheduler
from holdfast.training.options.config import Interval
from holdfast.training.step.train_state import TrainState

DAY = 86_400.0
stalls = st.floats(1e-4, 1e4)
times = st.floats(1.0, 1e8)


def higher_order(stall: float, mtbf: float) -> float:
    """Return Daly's closed form, exact to 0.2 % while a stall is less than a quarter of the time to a failure."""
    if stall >= 2 * mtbf:
        return mtbf
    ratio = stall / (2 * mtbf)
    return math.sqrt(2 * stall * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def wall(interval: float, stall: float, mtbf: float) -> float:
    """Return the wall time per second of work, without the parts that do not depend on the interval."""
    return mtbf * math.expm1((interval + stall) / mtbf) / interval


@given(stall=stalls, mtbf=times, aside=st.floats(0.5, 2.0))
def test_no_other_interval_costs_less(stall: float, mtbf: float, aside: float) -> None:
    assume(stall < 100 * mtbf)
    best = optimum(stall, mtbf)
    assert wall(best, stall, mtbf) <= wall(best * aside, stall, mtbf) * (1 + 1e-9)


@given(stall=stalls, mtbf=times)
def test_optimum_solves_dalys_equation_within_the_failure_time(stall: float, mtbf: float) -> None:
    best = optimum(stall, mtbf)
    assert 0 < best <= mtbf
    if stall < 10 * mtbf:
        assert math.log1p(-best / mtbf) + (best + stall) / mtbf == pytest.approx(0, abs=1e-9)


@given(stall=stalls, mtbf=times, factor=st.floats(1.01, 100))
def test_longer_stalls_and_rarer_failures_lengthen_the_interval(stall: float, mtbf: float, factor: float) -> None:
    assert optimum(stall * factor, mtbf) >= optimum(stall, mtbf)
    assert optimum(stall, mtbf * factor) >= optimum(stall, mtbf)


@given(stall=stalls, mtbf=times)
def test_dalys_closed_form_is_near_while_stalls_are_short(stall: float, mtbf: float) -> None:
    assume(stall <= mtbf / 4)
    assert higher_order(stall, mtbf) == pytest.approx(optimum(stall, mtbf), rel=0.002)
    first_order = math.sqrt(2 * stall * mtbf)
    assert abs(higher_order(stall, mtbf) - optimum(stall, mtbf)) <= abs(first_order - optimum(stall, mtbf)) + 1e-9


def test_stall_longer_than_the_failure_time_saves_once_a_failure() -> None:
    assert optimum(1e6, 60.0) == 60.0
    assert higher_order(1e6, 60.0) == 60.0


@given(
    saves=st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)), min_size=1, max_size=12),
    mtbf=times,
)
def test_the_choice_is_within_its_bounds(saves: list[tuple[float, float]], mtbf: float) -> None:
    cadence = IntervalChooser()
    for stall, write in saves:
        cadence.record(stall=stall, write=write)
    chosen = cadence.choose(mtbf).seconds
    longest = max(write for _, write in saves)
    assert LEAST_SECONDS <= chosen <= max(MOST_SECONDS, longest)


def test_new_choice_is_logged_with_its_inputs_when_it_changes() -> None:
    cadence = IntervalChooser()
    first = cadence.choose(DAY)
    assert (first.seconds, first.changed) == (FIRST_SECONDS, True)
    cadence.record(stall=0.5, write=2.0)
    second = cadence.choose(DAY)
    assert (round(second.seconds), second.changed) == (294, True)
    assert second.reason == "a checkpoint stops training for 0.500 s, a failure occurs every 86400 s"
    cadence.record(stall=0.51, write=2.0)
    assert cadence.choose(DAY).changed is False
    assert cadence.choose(DAY / 24).changed is True


def test_failed_checkpoint_is_retried_at_once_then_less_often() -> None:
    assert [retry_after(failed) for failed in range(1, 9)] == [
        0,
        1,
        2,
        4,
        8,
        16,
        MOST_RETRY_SECONDS,
        MOST_RETRY_SECONDS,
    ]
    assert retry_after(10**9) == MOST_RETRY_SECONDS


def test_one_slow_commit_changes_nothing() -> None:
    cadence = IntervalChooser()
    for stall in (0.5, 0.5, 60.0, 0.5, 0.5):
        cadence.record(stall=stall, write=1.0)
    assert round(cadence.choose(DAY).seconds) == 294


def test_checkpoint_is_never_due_before_the_last_can_be_durable() -> None:
    cadence = IntervalChooser()
    cadence.record(stall=0.01, write=4000.0)
    assert cadence.choose(DAY).seconds == 4000.0


def test_bounds_are_named_where_they_bind() -> None:
    cadence = IntervalChooser()
    cadence.record(stall=0.0001, write=0.1)
    assert cadence.choose(DAY).reason.endswith("the optimum of 4.2 s is out of bounds")


def test_failures_are_counted_over_launchers_that_come_and_go() -> None:
    lived = Failures().with_counters(LauncherFailures(id="a", failures=1, seconds=100.0))
    assert (lived.count, lived.seconds) == (1, 100.0)
    lived = lived.with_counters(LauncherFailures(id="a", failures=2, seconds=160.0))
    assert (lived.count, lived.seconds) == (2, 160.0)
    lived = lived.with_counters(LauncherFailures(id="b", failures=0, seconds=5.0))
    assert (lived.count, lived.seconds) == (3, 160.0), "the launcher that was lost is a failure"
    lived = lived.with_counters(LauncherFailures(id="b", failures=0, seconds=65.0))
    assert (lived.count, lived.seconds) == (3, 220.0)


def test_time_that_passes_is_counted_once() -> None:
    lived = Failures().with_counters(LauncherFailures(id="a", failures=0, seconds=10.0)).later(50.0)
    assert lived.seconds == 60.0
    assert lived.with_counters(LauncherFailures(id="a", failures=1, seconds=60.0)).seconds == 60.0


def test_history_travels_as_json_and_invalid_input_is_empty() -> None:
    lived = Failures().with_counters(LauncherFailures(id="a", failures=3, seconds=10.0))
    assert Failures.from_optional(lived.to_json()) == lived
    for rubbish in (None, {}, [], {"count": "many", "seconds": 1, "heard": None}, {"count": -1, "seconds": 1.0}):
        assert Failures.from_optional(rubbish) == Failures()


def test_seconds_that_no_float_holds_are_rubbish() -> None:
    counted = {"id": "a", "failures": 1, "seconds": 10**400}
    assert Failures.from_optional({"count": 0, "seconds": 10**400, "heard": None}) == Failures()
    assert Failures.from_optional({"count": 0, "seconds": 1.0, "heard": counted}) == Failures()


def test_launchers_that_tell_no_books_change_nothing() -> None:
    assert Failures(count=1, seconds=2.0).with_counters(None) == Failures(count=1, seconds=2.0)


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(scheduler, "time", made)
    return made


def chosen(log: str) -> int:
    """Return the interval in seconds that was logged last."""
    return int(re.findall(r"a checkpoint is due every (\d+) s", log)[-1])


def test_a_job_commits_when_its_own_choice_says_so(
    solo: Callable[..., Any], clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    run = solo(tmp_path, interval="Auto")
    caplog.set_level(logging.INFO, "holdfast.checkpoint")
    run.launcher.books = LauncherFailures(id="a", failures=23, seconds=0.0)
    model = torch.nn.Linear(2, 1)
    run.job.manage(model=model, optimizer=torch.optim.SGD(model.parameters()))

    def step() -> None:
        run.job.step(model(torch.ones(2)).sum())
        run.settle()

    def saved() -> list[int]:
        return [body["step"] for body in run.launcher.of("checkpoint")]

    step()
    clock.now += FIRST_SECONDS
    step()
    assert saved() == [2]
    step()  # records how the first one ended
    every = chosen(caplog.text)
    assert LEAST_SECONDS <= every <= MOST_SECONDS
    clock.now += every - 1
    step()
    assert saved() == [2]
    clock.now += 2
    step()
    assert saved() == [2, 5]
    found = restore(tmp_path, SingleRank(), job_uid="me").loaded
    assert found is not None
    assert found.manifest.state["failures"]["count"] == 23
    assert found.manifest.state["failures"]["seconds"] == pytest.approx(clock.now - 1000.0, abs=0.001)


def test_only_the_coordinators_clock_asks(solo: Callable[..., Any], clock: Clock, tmp_path: Path) -> None:
    run = solo(tmp_path)
    made = CheckpointScheduler(run.engine, run.launcher, Interval(auto=True), TrainState({}))
    made.begin(coordinator=True, cancel=run.launcher.cancel)
    clock.now += 10 * MOST_SECONDS
    assert made.overdue()
    made.begin(coordinator=False, cancel=run.launcher.cancel)
    assert not made.overdue()
