"""A step reports the slow ranks of its world to the launcher when they change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.core.attempt import AttemptId
from holdfast.telemetry.step_pace import StepPace
from holdfast.training.protocol import slow_ranks, step_ballot
from holdfast.training.step.stepper import Stepper

EQUAL = (0.1, 0.1, 0.1)
SLOW = {"rank": 2, "seconds": 0.5, "medianSeconds": 0.1, "activity": "compute"}
Run = tuple[Any, Callable[[Sequence[float]], None]]


@pytest.fixture
def run(solo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A job, and a function that makes one step in which the ranks of a world need these seconds for themselves."""
    monkeypatch.setattr(slow_ranks, "PERSISTS_SECONDS", 0.0)
    monkeypatch.setattr(slow_ranks, "LOOK_SECONDS", 0.0)
    made, model = solo(None, attempt_id=AttemptId(1, 1)), torch.nn.Linear(1, 1)
    made.launcher.moves_on = True
    made.job.manage(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))

    def step(own: Sequence[float]) -> None:
        paces = tuple(StepPace(compute=one, waiting=max(own) - one, weight=1 / len(own)) for one in own)
        monkeypatch.setattr(step_ballot, "paces", lambda *_, **__: paces)
        made.job.step(model(torch.ones(1, 1)).square().mean())

    return made, step


def test_slow_rank_is_reported_once_and_again_when_it_recovers(run: Run) -> None:
    made, step = run
    for own in (EQUAL, (0.1, 0.1, 0.5), (0.1, 0.1, 0.5), EQUAL, EQUAL):
        step(own)
    assert [told["ranks"] for told in made.launcher.of("slowRanks")] == [[SLOW], []]


def test_only_rank_0_reports(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have the same numbers."""
    made, step = run
    look = Stepper._look_for_slow_ranks
    of_rank_1 = SimpleNamespace(rank=1, size=3)
    monkeypatch.setattr(Stepper, "_look_for_slow_ranks", lambda own, numbers, _: look(own, numbers, of_rank_1))
    step((0.1, 0.1, 0.5))
    assert made.launcher.of("slowRanks") == []


def test_next_world_begins_without_slow_ranks(run: Run) -> None:
    made, step = run
    step((0.1, 0.1, 0.5))
    made.launcher.cancel.set("the next world")
    step((0.1, 0.1, 0.5))
    step((0.1, 0.1, 0.5))
    assert [told["ranks"] for told in made.launcher.of("slowRanks")] == [[SLOW], [SLOW]]
