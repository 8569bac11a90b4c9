"""A rank's own time per step, without the time in which it waits for others."""

from __future__ import annotations

import pytest

from holdfast.telemetry.activity import Activity
from holdfast.telemetry.rank_time import Ledger
from holdfast.telemetry.step_pace import KNOWN_STEPS, PaceWindow, StepPace


class Rank:
    def __init__(self) -> None:
        self.now, self.step = 0.0, 0
        self.ledger = Ledger(lambda: self.now)
        self.window = PaceWindow(self.ledger.seconds)

    def spend(self, activity: Activity, seconds: float) -> None:
        self.ledger.entered(activity, self.step)
        self.now += seconds

    def make(self, *, data: float = 0.1, compute: float = 0.3, waiting: float = 0.2) -> StepPace:
        self.spend(Activity.DATA, data)
        self.spend(Activity.COMPUTE, compute)
        self.ledger.entered(Activity.AVERAGE, self.step)
        pace = self.window.add(0.25)
        self.spend(Activity.AVERAGE, waiting / 2)
        self.spend(Activity.VOTE, waiting / 2)
        self.step += 1
        self.spend(Activity.APPLY, 0.05)
        return pace


def test_waiting_is_separate_and_the_optimizer_is_own_time() -> None:
    rank = Rank()
    assert not any(rank.make().known for _ in range(KNOWN_STEPS - 1))
    pace = rank.make()
    assert (pace.data, pace.compute, pace.waiting) == pytest.approx((0.1, 0.35, 0.2))
    assert pace.own == pytest.approx(0.45)
    assert pace.weight == 0.25


def test_a_single_long_step_changes_nothing() -> None:
    rank = Rank()
    for _ in range(20):
        usual = rank.make()
    assert rank.make(data=30.0) == pytest.approx(usual)
    assert rank.make(compute=30.0).own == pytest.approx(usual.own)


@pytest.mark.parametrize("activity", [Activity.CHECKPOINT, Activity.EVALUATION])
def test_checkpoints_and_evaluations_do_not_count(activity: Activity) -> None:
    rank = Rank()
    for _ in range(KNOWN_STEPS + 1):
        rank.spend(activity, 5.0)
        pace = rank.make()
    assert pace.own == pytest.approx(0.45)
