"""A rank is named as slow if the others wait for it for a minute, and never otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from holdfast.telemetry.step_pace import StepPace
from holdfast.training.protocol.slow_ranks import LOOK_SECONDS, MAX_REPORTED, PERSISTS_SECONDS, SlowRank, SlowRanks


def world(own: Sequence[float], *, communication: float = 0.0, weights: Sequence[float] = ()) -> list[StepPace]:
    """All ranks end a step together, so a fast rank waits for the slowest one."""
    step = max(own) + communication
    shares = weights or [1 / len(own)] * len(own)
    return [
        StepPace(data=0.2 * seconds, compute=0.8 * seconds, waiting=step - seconds, weight=share)
        for seconds, share in zip(own, shares, strict=True)
    ]


def look_for(ranks: SlowRanks, paces: Sequence[StepPace], seconds: float, since: float = 0.0) -> list[list[int]]:
    """Return the ranks of each change."""
    changes = []
    for look in range(int(seconds / LOOK_SECONDS) + 1):
        now = since + look * LOOK_SECONDS
        assert ranks.due(now)
        changes.append(ranks.look(paces, now))
    return [[one.rank for one in change] for change in changes if change is not None]


def named(paces: Sequence[StepPace]) -> list[list[int]]:
    return look_for(SlowRanks(), paces, 300.0)


NOISE = st.floats(0.97, 1.03)


@given(st.lists(NOISE, min_size=1, max_size=40), st.floats(1e-3, 100), st.floats(0, 2))
def test_equal_ranks_are_never_named(noise: list[float], seconds: float, communication: float) -> None:
    assert named(world([seconds * one for one in noise], communication=communication)) == []


@given(st.lists(NOISE, min_size=2, max_size=40), st.floats(1.7, 50), st.floats(1e-3, 100), st.data())
def test_one_slow_rank_is_always_named(
    noise: list[float], factor: float, seconds: float, data: st.DataObject
) -> None:
    slow = data.draw(st.integers(0, len(noise) - 1))
    own = [seconds * one * (factor if rank == slow else 1.0) for rank, one in enumerate(noise)]
    assert named(world(own)) == [[slow]]


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=12), st.integers(-10, 10))
def test_only_ratios_count(own: list[float], power: int) -> None:
    assert named(world([seconds * 2.0**power for seconds in own])) == named(world(own))


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=12))
def test_most_ranks_are_never_slow(own: list[float]) -> None:
    assert all(len(change) <= len(own) / 2 for change in named(world(own)))


def test_a_rank_is_named_after_a_minute_with_its_time() -> None:
    ranks, paces = SlowRanks(), world([1.0, 1.0, 5.0, 1.0])
    assert look_for(ranks, paces, PERSISTS_SECONDS - LOOK_SECONDS) == []
    assert ranks.look(paces, PERSISTS_SECONDS) == (
        SlowRank(rank=2, seconds=5.0, median_seconds=1.0, activity="compute"),
    )
    loading = replace(paces[2], data=3.0, compute=2.0)
    ranks = SlowRanks()
    look_for(ranks, [*paces[:2], loading, paces[3]], PERSISTS_SECONDS - LOOK_SECONDS)
    assert (ranks.look([*paces[:2], loading, paces[3]], PERSISTS_SECONDS) or ())[0].activity == "data"


def test_a_delay_that_the_step_hides_is_not_named() -> None:
    """The rank needs three times as long, and its delay takes less than a tenth of the step."""
    assert named(world([1.0, 1.0, 3.0, 1.0], communication=25.0)) == []
    assert named(world([1.0, 1.0, 3.0, 1.0], communication=10.0)) == [[2]]


def test_looks_are_rare() -> None:
    ranks = SlowRanks()
    ranks.look(world([1.0, 1.0]), 100.0)
    assert not ranks.due(100.0 + LOOK_SECONDS / 2)


def test_a_short_trouble_is_not_named() -> None:
    ranks = SlowRanks()
    for minute in range(5):
        assert look_for(ranks, world([1.0, 1.0, 3.0]), PERSISTS_SECONDS - LOOK_SECONDS, 100.0 * minute) == []
        assert look_for(ranks, world([1.0, 1.0, 1.0]), LOOK_SECONDS, 100.0 * minute + PERSISTS_SECONDS) == []


def test_a_report_ends_only_well_below_its_bound() -> None:
    ranks = SlowRanks()
    assert look_for(ranks, world([1.0, 1.0, 1.6]), 100.0) == [[2]]
    assert look_for(ranks, world([1.0, 1.0, 1.4]), 100.0, 200.0) == []
    assert look_for(ranks, world([1.0, 1.0, 1.2]), 100.0, 400.0) == [[]]
    assert look_for(ranks, world([1.0, 1.0, 1.4]), 100.0, 600.0) == []


def test_two_slow_ranks_of_one_node_are_both_named() -> None:
    assert named(world([1.0, 1.0, 2.0, 2.0])) == [[2, 3]]


def test_of_two_ranks_the_ratio_decides() -> None:
    assert named(world([1.0, 1.4])) == []
    assert named(world([1.6, 1.0])) == [[0]]


def test_ranks_that_differ_anyway_are_not_named() -> None:
    assert named(world([1.0, 1.3, 1.6, 1.9, 2.2, 2.5, 2.8])) == []


def test_a_delay_that_is_small_in_the_step_is_not_named() -> None:
    assert named(world([0.01, 0.01, 0.02], communication=1.0)) == []


def test_more_samples_do_not_make_a_rank_slow() -> None:
    assert named(world([2.0, 1.0, 1.0], weights=[0.5, 0.25, 0.25])) == []
    assert named(world([1.0, 0.6, 0.6], weights=[0.5, 0.25, 0.25])) == [], "with constant costs per step"
    assert named(world([2.0, 2.0, 1e-4, 1e-4], weights=[0.5, 0.5, 0.0, 0.0])) == [], "without samples"
    assert named(world([6.0, 1.0, 1.0], weights=[0.5, 0.25, 0.25])) == [[0]]


def test_ranks_without_enough_steps_are_not_compared() -> None:
    paces = world([1.0, 1.0, 3.0])
    assert named([StepPace(), StepPace(), paces[2]]) == []
    assert named([StepPace(), StepPace(), StepPace()]) == []


def test_a_report_has_a_bounded_size() -> None:
    (found,) = named(world([1.0] * 60 + [3.0] * 40))
    assert found == list(range(60, 60 + MAX_REPORTED))
