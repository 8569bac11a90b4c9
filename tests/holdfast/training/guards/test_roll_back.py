"""Jobs of one rank whose numbers are not finite at some samples or steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import RecordedNumbers, order
from solo_job import Solo

from holdfast import Guards, NonFiniteError

Make = Callable[..., Solo]
SIZE = 80
GUARDS = Guards(lower_after=2, roll_back_after=3, max_roll_backs=2)


class Bad(RecordedNumbers):
    """Numbers of which some samples give an infinite loss."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) * (float("inf") if index in self.bad else 1.0)


def parts() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01)}


def train(run: Solo, data: Bad, most: int, *, write: dict[int, float] | None = None) -> list[tuple[int, str]]:
    run.launcher.moves_on = True
    made = parts()
    run.job.manage(**made)
    results = []
    for batch in run.job.batches(data, global_batch_size=4, micro_batch_size=4, max_steps=most):
        loss = made["model"](batch).square().mean()
        if write and run.job.committed_step + 1 in write:
            made["model"][0].weight.data.fill_(write[run.job.committed_step + 1])
        result = run.job.step(loss)
        results.append((result.step, result.reason))
    return results


def test_row_rolls_back_to_the_checkpoint_before_it_and_skips_its_samples(
    solo: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    places = order(48, SIZE)
    data = Bad(SIZE, {places[16], places[21], places[26]})  # of the steps 5, 6 and 7
    run = solo(tmp_path, interval="2", guards=GUARDS)
    results = train(run, data, 9)
    assert results[4:7] == [(5, "NonFinite"), (6, "NonFinite"), (4, "RolledBack")]
    assert results[7:] == [(step, "Committed") for step in range(5, 10)]
    assert [(body["step"], body["samples"]) for body in run.launcher.of("rolledBack")] == [(7, 12)]
    assert [(body["step"], body["lowered"]) for body in run.launcher.of("skipped")] == [
        (5, False),
        (6, True),
        (7, False),
    ]
    assert [body["step"] for body in run.launcher.of("restored")] == [0, 4]
    expected = places[:16] + places[28:]
    consumed = data.read[:16] + data.read[-20:]
    assert consumed == expected
    audit = run.job.audit()
    assert (audit.ok, audit.skipped) == (True, 12)
    assert str(audit).endswith("12 skipped)")
    assert "step 5 was not applied: its loss is not finite" in caplog.messages
    assert f"step 5, rank 0: the batch had the samples {', '.join(map(str, places[16:20]))}" in caplog.messages
    assert "rank 0: the first module with an output that is not finite is model.0 (Linear)" in caplog.messages


def test_gradients_that_are_not_finite_name_the_samples_of_the_batch_and_no_rank(
    solo: Make, caplog: pytest.LogCaptureFixture
) -> None:
    run, weight = solo(None), torch.nn.Linear(2, 1, bias=False)
    run.job.manage(model=weight, optimizer=torch.optim.SGD(weight.parameters(), lr=0.01))
    reasons = []
    for batch in run.job.batches(Bad(SIZE, ()), global_batch_size=300, micro_batch_size=300, max_steps=1):
        unbounded = weight(batch).mean() * 0.0
        reasons.append(run.job.step(unbounded.abs().sqrt()).reason)  # the derivative of the root at 0 is infinite
    named = ", ".join(map(str, order(256, SIZE)))
    assert reasons == ["NonFinite"]
    assert "step 1 was not applied: its gradients are not finite" in caplog.messages
    assert f"step 1: the batch had the samples {named} and 44 more" in caplog.messages
    assert not [line for line in caplog.messages if "rank 0: the batch" in line]


def test_learning_rate_is_lower_after_the_roll_back(solo: Make, tmp_path: Path) -> None:
    places = order(48, SIZE)
    data = Bad(SIZE, {places[16], places[21], places[26]})
    run = solo(tmp_path, interval="2", guards=Guards(lower_after=2, roll_back_after=3, lowered_steps=2))
    train(run, data, 9)
    rates = {body["step"]: body["lr"] for body in run.launcher.of("step")}
    assert rates[4] == 0.01
    assert [rates[step] for step in range(5, 10)] == [0.005, 0.005, 0.005, 0.005, 0.01]


def test_record_survives_a_restart_from_the_next_checkpoint(solo: Make, tmp_path: Path) -> None:
    places = order(48, SIZE)
    data = Bad(SIZE, {places[16], places[21], places[26]})
    train(solo(tmp_path, interval="2", guards=GUARDS), data, 8)
    data.read.clear()
    again = solo(tmp_path, interval="2", guards=GUARDS)
    again.launcher.places = 5
    train(again, data, 9)
    assert data.read == order(48, SIZE)[44:48]
    assert (again.job.audit().ok, again.job.audit().skipped) == (True, 12)


def test_roll_back_without_an_earlier_checkpoint_fails_the_job_and_saves_nothing(solo: Make, tmp_path: Path) -> None:
    data = Bad(SIZE, range(SIZE))
    run = solo(tmp_path, interval="2", guards=GUARDS)
    with pytest.raises(NonFiniteError, match=r"steps 1 to 3 was not finite.*No checkpoint before step 1 exists"):
        train(run, data, 9)
    assert [body["name"] for body in run.launcher.of("exception")] == ["NonFiniteError"]


def test_job_without_a_checkpoint_folder_names_the_steps(solo: Make) -> None:
    places = order(48, SIZE)
    run = solo(None, guards=GUARDS)
    with pytest.raises(
        NonFiniteError, match=r"^3 steps in a row were not finite: the loss on rank 0 of steps 5 to 7 "
    ):
        train(run, Bad(SIZE, {places[16], places[21], places[26]}), 9)


def test_weights_that_become_infinite_go_back_at_once_and_further_each_time(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path, interval="2", keep_last=9, guards=GUARDS)
    with pytest.raises(
        NonFiniteError, match=r"^model\.0\.weight holds values that are not finite.*rolled back 2 times"
    ):
        train(run, Bad(SIZE, ()), 9, write={7: float("inf")})
    assert [body["step"] for body in run.launcher.of("restored")] == [0, 6, 4]


def test_spent_budget_of_skipped_steps_fails_the_job(solo: Make, tmp_path: Path) -> None:
    places = order(48, SIZE)
    run = solo(tmp_path, guards=Guards(max_skipped_steps=1, max_roll_backs=0))
    with pytest.raises(NonFiniteError, match=r"More than 1 steps were skipped"):
        train(run, Bad(SIZE, {places[5], places[13]}), 9)


def test_checkpoints_of_a_row_delete_none_before_it(solo: Make, tmp_path: Path) -> None:
    places = order(48, SIZE)
    data = Bad(SIZE, {places[place] for place in range(16, 28)})
    run = solo(tmp_path, interval="1", keep_last=1, guards=GUARDS)
    assert (4, "RolledBack") in train(run, data, 9)


def test_skipped_step_leaves_the_running_statistics_as_they_were(solo: Make) -> None:
    run, norm = solo(None), torch.nn.BatchNorm1d(2)
    model = torch.nn.Sequential(norm, torch.nn.Linear(2, 1))
    run.job.manage(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    seen = []
    data = Bad(SIZE, {order(8, SIZE)[5]})
    for batch in run.job.batches(data, global_batch_size=4, micro_batch_size=4, max_steps=3):
        before = norm.running_mean.clone() if norm.running_mean is not None else torch.zeros(2)
        reason = run.job.step(model(batch).square().mean()).reason
        assert norm.running_mean is not None
        seen.append((reason, torch.equal(norm.running_mean, before), bool(norm.running_mean.isfinite().all())))
    assert seen == [("Committed", False, True), ("NonFinite", True, True), ("Committed", False, True)]


def test_steps_apart_are_skipped_without_a_roll_back(solo: Make, tmp_path: Path) -> None:
    places = order(48, SIZE)
    run = solo(tmp_path, guards=GUARDS)
    results = train(run, Bad(SIZE, {places[5], places[13], places[21]}), 9)
    assert [step for step, reason in results if reason == "NonFinite"] == [2, 4, 6]
    assert not run.launcher.of("rolledBack")
    assert run.job.audit().ok
