"""A job saves when the interval `Auto` is over, by the clock of the coordinator."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.policy.interval import FIRST_SECONDS, LEAST_SECONDS, MOST_SECONDS, LauncherFailures
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.restore.search import restore
from holdfast.training.checkpointing import scheduler
from holdfast.training.checkpointing.scheduler import CheckpointScheduler
from holdfast.training.options.config import Interval
from holdfast.training.step.train_state import TrainState


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
    run.launcher.launcher_failures = LauncherFailures(id="a", failures=23, seconds=0.0)
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
