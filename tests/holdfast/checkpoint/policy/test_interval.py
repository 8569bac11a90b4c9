"""The interval `Auto` is optimal, follows the measurements and stays within its bounds."""

from __future__ import annotations

import math

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
