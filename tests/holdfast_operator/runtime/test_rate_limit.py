"""A pod may ask so many times at once and so often after that; others never pay for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_operator.runtime.rate_limit import RateLimit, Rates

RATE = RateLimit(a_second=2.0, at_once=3)


def test_a_burst_is_granted_then_the_rate() -> None:
    rates = Rates(RATE)
    assert [rates.take("a", 0.0) for _ in range(5)] == [0, 0, 0, 1, 1]
    assert [rates.take("a", 0.5) for _ in range(2)] == [0, 1]
    assert rates.take("b", 0.5) == 0
    assert [rates.take("a", 100.0) for _ in range(4)] == [0, 0, 0, 1]


def test_a_long_wait_is_told_in_whole_seconds() -> None:
    rates = Rates(RateLimit(a_second=0.1, at_once=1))
    assert [rates.take("a", 0.0), rates.take("a", 0.0), rates.take("a", 9.5)] == [0, 10, 1]


def test_a_clock_that_stands_or_goes_back_grants_nothing_more() -> None:
    rates = Rates(RATE)
    assert [rates.take("a", now) for now in (5.0, 5.0, 5.0, 5.0, 1.0)] == [0, 0, 0, 1, 1]


def test_memory_is_bounded_and_the_longest_silent_goes() -> None:
    rates = Rates(RateLimit(a_second=0.001, at_once=1), keys=2)
    assert [rates.take(key, 0.0) for key in "abac"] == [0, 0, 1000, 0]
    assert rates.take("a", 0.0) == 1000
    assert rates.take("b", 0.0) == 0


@given(gaps=st.lists(st.floats(0, 3), min_size=1, max_size=60))
def test_no_more_than_the_rate_is_granted_whatever_is_asked(gaps: list[float]) -> None:
    rates, now, granted = Rates(RATE), 0.0, 0
    for gap in gaps:
        now += gap
        granted += rates.take("a", now) == 0
        assert granted <= RATE.at_once + RATE.a_second * now + 1e-6
