"""How the scheduler handles the result of a save on a tier."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.checkpoint.saving.snapshot import SaveResult
from holdfast.core.errors import NoCapacityError
from holdfast.training.checkpointing.scheduler import CheckpointScheduler
from holdfast.training.options.config import Interval

FULL = SaveResult(committed=False, message="too small", cause="Full", full=True)
FAILED = SaveResult(committed=False, message="lost", cause="Network", copy_failed=True)


class Run:
    """A scheduler whose tier returns the results that a test sets."""

    def __init__(self, *results: SaveResult, in_background: bool = False) -> None:
        self.told: list[dict[str, Any]] = []
        due = lambda step: step % 2 == 0  # noqa: E731
        self.tier: Any = SimpleNamespace(name="memory", in_background=in_background, due_at=due)
        left = iter(results)
        saving = SimpleNamespace(ended=True, lost="", result=None)

        def begin(tier: Any, snapshot: Any, told: Any) -> Any:
            saving.result = next(left)
            return saving

        engine = SimpleNamespace(tiers=(self.tier,), save_on=lambda *_, **__: next(left), begin_on=begin)
        agent = SimpleNamespace(send=lambda kind, **body: self.told.append(body))
        self.scheduler = CheckpointScheduler(
            cast(Any, engine), cast(Any, agent), Interval(), cast(Any, SimpleNamespace())
        )

    def save(self, step: int, *, asked: bool = False) -> None:
        for tier in self.scheduler.due_now(step, requested=asked):
            self.scheduler.save_now(tier, step, lambda: cast(Any, None), requested=asked)


def test_training_stops_if_the_first_save_has_no_capacity() -> None:
    with pytest.raises(NoCapacityError, match="too small"):
        Run(FULL).save(2)


def test_leaving_worker_leaves_although_there_is_no_capacity() -> None:
    run = Run(FULL)
    run.save(3, asked=True)
    assert [(one["result"], one["cause"], one["tier"]) for one in run.told] == [("Failed", "Full", "memory")]


def test_nothing_is_saved_at_a_step_that_is_not_due() -> None:
    run = Run(SaveResult(committed=True))
    run.save(3)
    assert run.told == []
    run.save(4)
    assert [one["step"] for one in run.told] == [4]


def test_same_error_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A failed copy counts for the peer tier."""
    run = Run(FAILED, FAILED, SaveResult(committed=True), FAILED)
    with caplog.at_level(logging.ERROR):
        for step in (2, 4, 6, 8):
            run.save(step)
    assert [(one["step"], one["result"], one["tier"]) for one in run.told] == [
        (2, "Failed", "peer"),
        (6, "Committed", "memory"),
        (8, "Failed", "peer"),
    ]
    assert caplog.text.count("could not be saved on the memory tier (Network): lost") == 2


def test_background_save_is_postponed_while_others_write() -> None:
    """If nothing fits, the next background save ends training."""
    run = Run(FULL, in_background=True)
    scheduler = run.scheduler
    assert scheduler.due_in_background(1, busy=False) is None
    assert scheduler.due_in_background(2, busy=True) is None
    assert scheduler.due_in_background(3, busy=False) is run.tier, "it was due before"
    scheduler.save_in_background(run.tier, 3, lambda: cast(Any, None))
    assert scheduler.due_in_background(3, busy=False) is None
    with pytest.raises(NoCapacityError, match="too small"):
        scheduler.save_in_background(run.tier, 4, lambda: cast(Any, None))
