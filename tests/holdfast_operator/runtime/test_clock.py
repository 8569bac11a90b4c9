"""The operator's clock is the time of day without its jumps."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_operator.runtime.clock import SteadyClock

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


class Times:
    """A machine's two clocks."""

    def __init__(self) -> None:
        self.passed, self.set_by = 0.0, 0.0
        self.clock = SteadyClock(wall=self.wall, uptime=lambda: self.passed)

    def wall(self) -> datetime:
        return NOON + timedelta(seconds=self.passed + self.set_by)

    def after(self, seconds: float) -> float:
        """What it shows so much later, in seconds after noon."""
        self.passed += seconds
        return (self.clock() - NOON).total_seconds()


def test_it_begins_with_the_time_of_day_and_goes_with_it() -> None:
    times = Times()
    assert [times.after(5), times.after(0), times.after(3600)] == [5, 5, 3605]


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_that_was_set_is_followed_slowly(jump: float, caplog: pytest.LogCaptureFixture) -> None:
    times = Times()
    times.set_by = jump
    assert times.after(10) == pytest.approx(11 if jump > 0 else 9)
    assert times.after(36000) == pytest.approx(36010 + jump)
    assert times.after(10) == pytest.approx(36020 + jump)
    (told,) = caplog.messages
    assert told == f"the time of day was set, it is {jump:.0f} s from ours now: we follow it slowly"


def test_it_is_told_again_when_it_is_set_again(caplog: pytest.LogCaptureFixture) -> None:
    times = Times()
    for jump in (60.0, -120.0, 7.0):
        times.set_by += jump
        times.after(1)
        times.after(1)
    assert [message.split()[8] for message in caplog.messages] == ["60", "-60", "-53"]


@given(moves=st.lists(st.tuples(st.floats(0, 1e4), st.floats(-1e6, 1e6)), max_size=20))
def test_clock_never_goes_back(moves: list[tuple[float, float]]) -> None:
    """No interval is much longer or shorter than in reality."""
    times = Times()
    before = times.after(0)
    for passed, jump in moves:
        times.set_by += jump
        shown = times.after(passed)
        assert 0.9 * passed - 1e-5 <= shown - before <= 1.1 * passed + 1e-5
        before = shown
