"""A loader of the script gets another sample for one that cannot be read, also in worker processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_training import Numbers
from solo_job import Solo
from torch.utils.data import DataLoader

from holdfast import BadSampleError, Guards, PeerLostError
from holdfast.core.attempt import AttemptId
from holdfast.training.data.readable_dataset import Reports
from holdfast.training.step.train_state import TrainState

Make = Callable[..., Solo]


class Broken(Numbers):
    """Numbers of which some cannot be read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in (3, 4, 9):
            raise ValueError(f"sample {index} is broken")
        return super().__getitem__(index)


def train(run: Solo, **more: Any) -> list[list[float]]:
    """Train two epochs, and return the samples of each step."""
    model = torch.nn.Linear(2, 1)
    run.job.manage(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    loader = DataLoader(run.job.readable(Broken(12)), batch_size=4, **more)  # type: ignore[arg-type]
    steps = []
    for _ in range(2):
        for batch in loader:
            run.job.step(model(batch).square().mean())
            steps.append((batch[:, 0] * 10).round().tolist())
    return steps


@pytest.mark.parametrize("more", [{}, {"num_workers": 2}])
def test_next_sample_takes_the_place_of_a_bad_one(
    solo: Make, more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    run = solo(None, guards=Guards(sample_retries=0, max_bad_samples=3))
    steps = train(run, **more)
    assert steps == [[0, 1, 2, 5], [5, 5, 6, 7], [8, 10, 10, 11]] * 2
    named = [sample["sample"] for told in run.launcher.of("badSamples") for sample in told["samples"]]
    assert sorted(named) == [3, 3, 4, 4, 9, 9]
    assert "rank 0: sample 9 is replaced: ValueError: sample 9 is broken" in caplog.text


def test_budget_counts_samples_of_worker_processes(solo: Make) -> None:
    run = solo(None, guards=Guards(sample_retries=0, max_bad_samples=2))
    with pytest.raises(BadSampleError, match=r"^3 samples of the dataset cannot be read"):
        train(run, num_workers=2)


def test_dataset_can_be_sent_to_a_worker_process_that_is_not_forked(solo: Make) -> None:
    run = solo(None, guards=Guards(sample_retries=0))
    dataset = pickle.loads(pickle.dumps(run.job.readable(Broken(12))))  # noqa: S301
    assert dataset[3][0] == pytest.approx(0.5)


def test_without_a_budget_the_error_is_raised(solo: Make) -> None:
    run = solo(None, guards=Guards(sample_retries=0, max_bad_samples=0))
    with pytest.raises(ValueError, match="sample 3 is broken"):
        run.job.readable(Broken(12))[3]


def test_samples_of_a_step_without_its_vote_count_once(solo: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = solo(None, attempt_id=AttemptId(1, 1), guards=Guards(sample_retries=0, max_bad_samples=3))
    run.launcher.moves_on = True
    stepped, lost = TrainState.stepped, []

    def breaks(state: TrainState, attempt_id: AttemptId) -> None:
        if state.step == 1 and not lost:
            lost.append(state)
            raise PeerLostError("cut")
        stepped(state, attempt_id)

    monkeypatch.setattr(TrainState, "stepped", breaks)
    assert len(train(run)) == 6
    told = [(told["step"], [one["sample"] for one in told["samples"]]) for told in run.launcher.of("badSamples")]
    assert told == [(1, [3]), (2, [4]), (3, [9]), (4, [3]), (5, [4]), (6, [9])]
    assert lost[0].bad_samples.skipped == 6


def test_line_that_is_being_written_is_read_later() -> None:
    reports = Reports()
    with reports.path().open("ab", buffering=0) as file:
        file.write(b'{"sample": 1, "error": "a"}\n{"sample": 2, ')
        assert [one.sample for one in reports.fresh()] == [1]
        file.write(b'"error": "b"}\n')
        assert [one.sample for one in reports.fresh()] == [2]
