from __future__ import annotations

import pytest

from holdfast.training.data.sample_range import SampleRange, place_of, ranges_of

SKIPPED = (SampleRange(begin=4, end=6), SampleRange(begin=9, end=12))


def expand(ranges: tuple[SampleRange, ...]) -> list[int]:
    return [place for one in ranges for place in range(one.begin, one.end)]


def test_numbers_pass_over_the_skipped_places() -> None:
    assert [place_of(number, SKIPPED) for number in range(9)] == [0, 1, 2, 3, 6, 7, 8, 12, 13]


@pytest.mark.parametrize("begin", range(9))
@pytest.mark.parametrize("count", range(6))
def test_ranges_are_the_places_of_their_numbers(begin: int, count: int) -> None:
    places = [place_of(number, SKIPPED) for number in range(begin, begin + count)]
    assert expand(ranges_of(begin, begin + count, SKIPPED)) == places


def test_neighbouring_ranges_are_passed_over_together() -> None:
    both = (SampleRange(begin=2, end=4), SampleRange(begin=4, end=6))
    assert [place_of(number, both) for number in range(4)] == [0, 1, 6, 7]
