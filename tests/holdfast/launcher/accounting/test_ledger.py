"""The ledger of a rank assigns each second to one activity, without gaps or duplicates."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.telemetry.activity import Activity, Meter
from holdfast.telemetry.rank_time import BOUNDS, Histogram, Ledger, Spent, mtbf

DELAY = 2.0
STEP = ((Activity.DATA, 0.1), (Activity.COMPUTE, 0.6), (Activity.AVERAGE, 0.2), (Activity.VOTE, 0.05))


class Rank:
    """A rank that runs the given activities for the given durations."""

    def __init__(self, *, reads_take: float = 0.0) -> None:
        self.now = 1000.0
        self._reads_take = reads_take
        self.told: list[dict[str, Any]] = []
        self.ledger = Ledger(self._clock, self.told.append)
        self.meter = Meter(self.ledger)
        self.committed = 0

    def _clock(self) -> float:
        self.now += self._reads_take
        return self.now

    def does(self, activity: Activity, seconds: float, step: int | None = None) -> None:
        self.meter.enter(activity, step)
        self.now += seconds

    def lines_up(self, *, waits: float = 0.3, syncs: float = 0.4) -> None:
        self.does(Activity.PARKED, waits)
        self.does(Activity.SYNC, syncs, self.committed)

    def steps(self, *, slow: Activity | None = None) -> None:
        self.tries(slow=slow)
        self.does(Activity.APPLY, 0.05 + (DELAY if slow is Activity.APPLY else 0.0))
        self.committed += 1
        self.meter.enter(Activity.DATA, self.committed)

    def tries(self, *, slow: Activity | None = None) -> None:
        for activity, seconds in STEP:
            step = self.committed if activity is Activity.DATA else None
            self.does(activity, seconds + (DELAY if slow is activity else 0.0), step)

    def parks(self) -> None:
        self.meter.enter(Activity.PARKED)

    @property
    def books(self) -> dict[str, float]:
        return self.ledger.report()["seconds"]

    @property
    def unattributed(self) -> float:
        report = self.ledger.report()
        return float(report["wall"] - report["open"] - sum(report["seconds"].values()))


def life(*, slow: Activity | None = None, evaluates: float = 0.5, saves: float = 0.2, syncs: float = 0.4) -> Rank:
    """Three steps, a checkpoint and an evaluation. The fourth step fails and is repeated."""
    rank = Rank()
    rank.lines_up(syncs=syncs)
    for _ in range(3):
        rank.steps()
    rank.steps(slow=slow)
    with rank.meter.during(Activity.CHECKPOINT):
        rank.now += saves
    with rank.meter.during(Activity.EVALUATION):
        rank.now += evaluates
    rank.tries()
    rank.lines_up()
    rank.steps()
    return rank


def test_the_time_of_a_life_is_where_it_belongs() -> None:
    assert life().books == pytest.approx(
        {
            "productive": 5 * 0.9,
            "startup": 0.4,
            "data": 6 * 0.1,
            "checkpoint": 0.2,
            "evaluation": 0.5,
            "detection": 0.05,  # the vote that never completed
            "restart": 0.4,
            "recompute": 0.6 + 0.2,
            "idle": 0.0,
        }
    )


def test_what_a_rank_does_is_told_beside_what_it_was_good_for() -> None:
    told = life().ledger.report()["activities"]
    assert told == pytest.approx(
        {
            "data": 6 * 0.1,
            "compute": 6 * 0.6,
            "average": 6 * 0.2,
            "vote": 6 * 0.05,
            "apply": 5 * 0.05,
            "checkpoint": 0.2,
            "evaluation": 0.5,
        }
    )


@pytest.mark.parametrize(
    ("delayed", "cause"),
    [
        ({"slow": Activity.DATA}, Spent.DATA),
        ({"slow": Activity.COMPUTE}, Spent.PRODUCTIVE),
        ({"saves": 0.2 + DELAY}, Spent.CHECKPOINT),
        ({"evaluates": 0.5 + DELAY}, Spent.EVALUATION),
        ({"syncs": 0.4 + DELAY}, Spent.STARTUP),
    ],
)
def test_a_delay_raises_its_own_cause_and_no_other(delayed: dict[str, Any], cause: Spent) -> None:
    usual, slow = life().books, life(**delayed).books
    raised = {name: slow[name] - usual[name] for name in usual}
    assert raised.pop(cause) == pytest.approx(DELAY, rel=0.05)
    assert raised == pytest.approx(dict.fromkeys(raised, 0.0), abs=1e-6)


def test_waiting_for_a_peer_that_is_gone_is_detection() -> None:
    rank = Rank()
    rank.lines_up()
    rank.tries(slow=Activity.VOTE)
    rank.parks()
    assert rank.books["detection"] == pytest.approx(DELAY + 0.05)


def test_prepared_step_that_is_applied_later_was_productive() -> None:
    rank = Rank()
    rank.lines_up()
    rank.tries()
    rank.lines_up()
    rank.does(Activity.APPLY, 0.05)
    rank.committed += 1
    rank.does(Activity.DATA, 0.1, rank.committed)
    assert rank.books["productive"] == pytest.approx(0.6 + 0.2 + 0.05)
    assert rank.books["recompute"] == 0.0


def test_steps_that_the_job_had_made_before_are_recompute() -> None:
    rank = Rank()
    rank.ledger.reached(2)
    rank.lines_up()
    for _ in range(3):
        rank.steps()
    assert rank.books["recompute"] == pytest.approx(2 * 0.9)
    assert rank.books["productive"] == pytest.approx(0.9)


def test_steps_made_again_from_an_older_checkpoint_are_recompute() -> None:
    rank = Rank()
    rank.lines_up()
    for _ in range(3):
        rank.steps()
    rank.committed = 1
    rank.lines_up()
    rank.does(Activity.RESTORE, 0.1)
    for _ in range(3):
        rank.steps()
    assert rank.books["recompute"] == pytest.approx(2 * 0.9)
    assert rank.books["productive"] == pytest.approx(4 * 0.9)


def test_a_step_that_was_passed_over_is_not_productive() -> None:
    rank = Rank()
    rank.lines_up()
    rank.tries()
    rank.does(Activity.APPLY, 0.05)
    rank.committed += 1
    rank.ledger.step(step=rank.committed, committed=False)
    rank.does(Activity.DATA, 0.1, rank.committed)
    assert rank.books["recompute"] == pytest.approx(0.9)
    assert rank.books["productive"] == 0.0


def test_time_outside_a_world_is_not_in_the_ranks_books() -> None:
    rank = Rank()
    rank.now += 5.0
    rank.lines_up(waits=7.0)
    rank.steps()
    rank.parks()
    rank.now += 9.0
    report = rank.ledger.report()
    assert report["wall"] == pytest.approx(0.4 + 0.1 + 0.9)
    assert sum(report["seconds"].values()) + report["open"] == pytest.approx(report["wall"])


def test_rank_reports_when_in_place_at_exit_and_each_second() -> None:
    rank = Rank()
    rank.does(Activity.PARKED, 0.1)
    rank.does(Activity.SYNC, 0.4, 0)
    assert [report["activity"] for report in rank.told] == ["sync"]
    for _ in range(50):
        for activity in (Activity.DATA, Activity.COMPUTE, Activity.AVERAGE):
            rank.does(activity, 0.02)
    assert 4 <= len(rank.told) <= 6
    rank.parks()
    assert rank.told[-1]["activity"] == "parked"


def test_no_cause_ever_falls() -> None:
    rank = life()
    rank.parks()
    for earlier, later in zip(rank.told, rank.told[1:], strict=False):
        assert all(later["seconds"][name] >= earlier["seconds"][name] for name in earlier["seconds"])


@given(
    moves=st.lists(
        st.tuples(st.sampled_from(Activity), st.floats(0.001, 3.0), st.integers(0, 3)), min_size=1, max_size=200
    ),
    reads_take=st.floats(0.0, 1e-6),
)
def test_whatever_a_rank_does_the_timers_sum_to_the_wall_time(
    moves: list[tuple[Activity, float, int]], reads_take: float
) -> None:
    rank = Rank(reads_take=reads_take)
    step = 0
    for activity, seconds, advance in moves:
        step += advance - 1
        rank.does(activity, seconds, step)
        assert abs(rank.unattributed) <= 0.01 * rank.ledger.report()["wall"] + 1e-5
        assert min(rank.books.values()) >= 0.0


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram()
    for value in (0.05, 0.07, 1000.0):
        histogram.observe(value)
    wire = histogram.to_json()
    assert (wire["count"], wire["sum"]) == (3, 1000.12)
    assert wire["buckets"][:2] == [[0.05, 1], [0.1, 2]]
    assert wire["buckets"][-1] == [BOUNDS[-1], 2]


def test_estimated_time_between_failures_follows_observations() -> None:
    assert mtbf(0, 0.0) == 86_400.0
    assert mtbf(9, 9 * 3600.0) == pytest.approx((86_400 + 9 * 3600) / 10)
    assert mtbf(1000, 1000 * 60.0) == pytest.approx(60, rel=2)
