"""Jobs of one rank that cannot read some samples of their dataset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import Numbers, RecordedNumbers, order
from solo_job import Solo

from holdfast import BadSampleError, Guards

Make = Callable[..., Solo]
SIZE = 40
GUARDS = Guards(sample_retries=0, max_bad_samples=3)


class Broken(RecordedNumbers):
    """Numbers of which some cannot be read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        number = super().__getitem__(index)
        if index in self.bad:
            raise ValueError(f"sample {index} is broken")
        return number


def train(run: Solo, data: Broken, most: int, *, batch: int = 4, micro: int = 2, **more: Any) -> torch.nn.Linear:
    run.launcher.moves_on = True
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    run.job.manage(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **more)
    for part in run.job.batches(data, global_batch_size=batch, micro_batch_size=micro, max_steps=most):
        run.job.step(model(part).square().mean())
    return model


def by_hand(batches: list[list[int]]) -> torch.nn.Linear:
    """Train on exactly these samples."""
    torch.manual_seed(0)
    model, numbers = torch.nn.Linear(2, 1), Numbers(SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        if batch:
            model(torch.stack([numbers[sample] for sample in batch])).square().mean().backward()
            optimizer.step()
    return model


def same(one: torch.nn.Linear, other: torch.nn.Linear) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict())


def test_step_is_the_mean_over_the_samples_that_can_be_read(solo: Make, caplog: pytest.LogCaptureFixture) -> None:
    places, run = order(12, SIZE), solo(None, guards=GUARDS)
    model = train(run, Broken(SIZE, {places[5], places[6]}), 3)
    same(model, by_hand([places[:4], [places[4], places[7]], places[8:]]))
    (told,) = run.launcher.of("badSamples")
    errors = [{"sample": s, "rank": 0, "step": 2, "error": f"ValueError: sample {s} is broken"} for s in places[5:7]]
    assert told == {"step": 2, "number": 2, "samples": errors}
    assert f"step 2, rank 0: sample {places[5]} is skipped: ValueError: sample {places[5]} is broken" in caplog.text
    audit = run.job.audit()
    assert (audit.ok, audit.unreadable, audit.seen.count) == (True, 2, 12)
    assert str(audit).endswith(", 2 unreadable)")


def test_micro_batch_without_a_readable_sample_does_not_count(solo: Make) -> None:
    places, run = order(12, SIZE), solo(None, guards=GUARDS)
    model = train(run, Broken(SIZE, {places[4], places[5]}), 3)
    same(model, by_hand([places[:4], places[6:8], places[8:]]))


def test_step_without_a_readable_sample_changes_nothing(solo: Make) -> None:
    places, run = order(6, SIZE), solo(None, guards=GUARDS)
    model = train(run, Broken(SIZE, {places[2], places[3]}), 3, batch=2)
    same(model, by_hand([places[:2], [], places[4:]]))
    assert [body["step"] for body in run.launcher.of("step")] == [1, 3]
    assert run.job.audit().ok


def test_step_without_a_readable_sample_leaves_the_scaler_alone(solo: Make) -> None:
    places, run = order(6, SIZE), solo(None, guards=GUARDS)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model = train(run, Broken(SIZE, {places[2], places[3]}), 3, batch=2, scaler=scaler)
    same(model, by_hand([places[:2], [], places[4:]]))
    assert scaler.get_scale() == 4.0


def test_sample_is_named_once_and_counted_again_in_the_next_epoch(solo: Make) -> None:
    run = solo(None, guards=GUARDS)
    train(run, Broken(SIZE, {7}), 20)
    assert len(run.launcher.of("badSamples")) == 2
    assert run.job.audit().unreadable == 2


def test_restart_neither_repeats_nor_loses_a_bad_sample(solo: Make, tmp_path: Path) -> None:
    places = order(20, SIZE)
    train(solo(tmp_path, interval="1", guards=GUARDS), Broken(SIZE, {places[5]}), 3)
    again, data = solo(tmp_path, interval="1", guards=GUARDS), Broken(SIZE, {places[5], places[13]})
    again.launcher.places = 5
    train(again, data, 5)
    assert data.read == places[12:20]
    audit = again.job.audit()
    assert (audit.ok, audit.unreadable) == (True, 2)


def test_spent_budget_fails_the_job_and_names_all_samples(solo: Make, tmp_path: Path) -> None:
    places, guards = order(20, SIZE), Guards(sample_retries=0, max_bad_samples=2)
    bad = [places[1], places[9], places[13]]
    run = solo(tmp_path, interval="1", guards=guards)
    named = f"All samples: {', '.join(map(str, bad))}\\. .*raise max_bad_samples"
    with pytest.raises(BadSampleError, match=named) as caught:
        train(run, Broken(SIZE, bad), 5)
    assert str(caught.value).startswith("3 samples of the dataset cannot be read, and max_bad_samples is 2.")
    assert f"sample {bad[2]} (rank 0, step 4: ValueError: sample {bad[2]} is broken)" in str(caught.value)
    assert [body["name"] for body in run.launcher.of("exception")] == ["BadSampleError"]
    run.job.close(failed=lambda: True)
    again = solo(tmp_path, interval="1", guards=Guards(sample_retries=0, max_bad_samples=3))
    again.launcher.places = 5
    train(again, Broken(SIZE, bad), 5)
    assert (again.job.audit().ok, again.job.audit().unreadable) == (True, 3)


@pytest.mark.parametrize("bad", [range(SIZE), None])
def test_dataset_that_fails_as_a_whole_raises_its_error(solo: Make, bad: Any) -> None:
    """It is not the fault of a sample, and a restart may cure it."""
    guards = GUARDS if bad is not None else Guards(sample_retries=0, max_bad_samples=0)
    with pytest.raises(ValueError, match="is broken"):
        train(solo(None, guards=guards), Broken(SIZE, {order(1, SIZE)[0]} if bad is None else bad), 5)
