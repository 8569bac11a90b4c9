"""The loop in a world of one: what a step does, what is refused, and the requests of the launcher."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import Numbers, parts, train

from holdfast import NonFiniteError, StateError, UsageError
from holdfast.training.launcher_client.connection import Requests
from holdfast.training.step.device_memory import free_graph

Make = Callable[..., Any]


def test_commits_come_at_multiples_of_the_interval(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path, interval="3")
    train(run.job, 10)
    told = run.launcher.of("checkpoint")
    assert [(body["step"], body["ids"]) for body in told] == [
        (3, ["interval"]),
        (6, ["interval"]),
        (9, ["interval"]),
        (10, []),
    ]


def test_quiesce_commits_and_makes_no_step_after_it(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path)
    run.launcher.wanted = Requests(quiesce=("drain",))
    with pytest.raises(BaseException) as ended:  # noqa: PT011  (the recorder's own)
        train(run.job, 10)
    assert type(ended.value).__name__ == "TheEnd"
    assert [kind for kind, _ in run.launcher.told if kind != "phase"][-2:] == ["checkpoint", "quiesced"]
    assert run.launcher.of("quiesced") == [{"step": 1}]
    assert (tmp_path / "step-1.g1.a1" / "MANIFEST.json").exists()


def test_quiesce_without_a_checkpoint_folder_needs_no_commit(solo: Make) -> None:
    run = solo(None)
    run.launcher.wanted = Requests(quiesce=("grow",))
    with pytest.raises(BaseException) as ended:  # noqa: PT011  (the recorder's own)
        train(run.job, 10)
    assert type(ended.value).__name__ == "TheEnd"
    assert run.launcher.of("quiesced") == [{"step": 1}]


def test_a_step_that_is_not_finite_is_not_applied(solo: Make) -> None:
    run = solo(None)
    made = parts()
    run.job.manage(**made)
    outcomes = []
    for batch in run.job.batches(Numbers(), global_batch_size=4, micro_batch_size=4, max_steps=3):
        before = [parameter.clone() for parameter in made["model"].parameters()]
        factor = float("nan") if len(outcomes) == 1 else 1.0
        result = run.job.step(made["model"](batch).square().mean() * factor)
        same = all(torch.equal(a, b) for a, b in zip(before, made["model"].parameters(), strict=True))
        outcomes.append((result.step, result.committed, result.reason, same))
    assert outcomes == [(1, True, "Committed", False), (2, False, "NonFinite", True), (3, True, "Committed", False)]
    assert [body["step"] for body in run.launcher.of("step")] == [1, 3]


def test_ten_steps_in_a_row_that_are_not_finite_end_the_script(solo: Make) -> None:
    run = solo(None)
    made = parts()
    run.job.manage(**made)
    with pytest.raises(NonFiniteError, match=r"Lower the learning rate.*holdfast checkpoints rewind FOLDER --step N"):  # noqa: PT012  (the loop raises)
        for batch in run.job.batches(Numbers(), global_batch_size=4, micro_batch_size=4, max_steps=30):
            run.job.step(made["model"](batch).square().mean() * float("inf"))
    assert run.job.committed_step == 10


def test_own_loader_makes_one_step_per_call_and_saves_on_request(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path)
    made = parts()
    run.job.manage(**made)
    for index in range(3):
        result = run.job.step(made["model"](Numbers()[index]).square().mean(), samples=4)
        assert (result.committed, result.step) == (True, index + 1)
    assert run.job.save()
    again = solo(tmp_path)
    again.job.manage(**parts())
    assert again.job.committed_step == 3


def test_a_metric_that_is_no_number_is_refused(solo: Make) -> None:
    with pytest.raises(UsageError, match=r"expected a finite number"):
        solo(None).job.save(metrics={"loss": float("nan")})


def test_rank_without_samples_has_no_weight(solo: Make) -> None:
    """A step without any samples is refused."""
    job = solo(None).job
    made = parts()
    job.manage(**made)
    before = [parameter.clone() for parameter in made["model"].parameters()]
    with pytest.raises(UsageError, match="no rank had a sample"):
        job.step(made["model"](torch.empty(0, 2)).mean(), samples=0)
    assert job.committed_step == 0
    assert all(torch.equal(a, b) for a, b in zip(before, made["model"].parameters(), strict=True))


def test_phases_are_told_and_left_again(solo: Make) -> None:
    run = solo(None)
    run.job.manage(**parts())
    with run.job.phase("evaluation"):
        pass
    assert [body["phase"] for body in run.launcher.of("phase")] == ["restore", "step", "evaluation", "step"]
    with pytest.raises(UsageError, match="'lunch' is not valid: expected one of"), run.job.phase("lunch"):
        pass


def test_misuse_says_what_to_do(solo: Make) -> None:
    job = solo(None).job
    with pytest.raises(UsageError, match=r"call job\.manage"):
        job.step(torch.zeros(()))
    with pytest.raises(UsageError, match=r"call job\.manage"):
        job.batches(Numbers(), global_batch_size=4, micro_batch_size=2, max_steps=2)
    with pytest.raises(StateError, match="'extra' is of type int, which has no state_dict"):
        job.manage(extra=3)
    job.manage(**parts())
    with pytest.raises(UsageError, match="called twice"):
        job.manage(**parts())
    with pytest.raises(UsageError, match="phase"), job.phase(""):
        pass


def test_a_batch_without_its_step_is_refused(solo: Make) -> None:
    job = solo(None).job
    job.manage(**parts())
    with pytest.raises(UsageError, match="took a batch and did not call"):
        for _ in job.batches(Numbers(), global_batch_size=4, micro_batch_size=2, max_steps=2):
            pass


def test_a_step_without_its_batch_is_refused(solo: Make) -> None:
    job = solo(None).job
    made = parts()
    job.manage(**made)
    batch = next(iter(job.batches(Numbers(), global_batch_size=4, micro_batch_size=2, max_steps=2)))
    job.step(made["model"](batch).mean())
    with pytest.raises(UsageError, match="without a batch"):
        job.step(made["model"](batch).mean())


def test_unsavable_state_is_refused_before_the_first_step(solo: Make, tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"open": sys.stdout}

        def load_state_dict(self, state: Any) -> None:
            return None

    run = solo(tmp_path)
    with pytest.raises(StateError, match=r"odd\.open is of type .*which cannot be saved without pickle"):
        run.job.manage(odd=Odd())
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_changes_in_mid_run_is_in_no_commit(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path)
    made = parts()
    run.job.manage(**made)
    run.job.step(made["model"](Numbers()[0]).square().mean())
    made["model"].append(torch.nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"model\.3\.weight, model\.3\.bias: new"):
        run.job.save()
    assert not list(tmp_path.glob("step-*"))


def test_what_is_no_loss_is_refused_at_step(solo: Make) -> None:
    job = solo(None).job
    made = parts()
    job.manage(**made)
    with pytest.raises(UsageError, match=r"loss\.mean\(\)"):
        job.step(made["model"](torch.ones(3, 2)))


def test_a_loss_whose_step_was_given_up_holds_no_graph() -> None:
    """Its activations would stay while the step is repeated, and a large model has no memory for both."""
    weight = torch.nn.Parameter(torch.ones(2))
    loss = (weight * 3).sum()
    free_graph(loss)
    assert loss.grad_fn is None
    assert float(loss) == 6.0
    view = (weight * 3)[:1].view(())
    free_graph(view)
    assert float(view.detach()) == 3.0


@pytest.mark.parametrize("call", ["synchronize", "verify_replicas"])
def test_replicas_are_not_compared_between_two_micro_batches(solo: Make, call: str) -> None:
    run, made = solo(None), parts()
    run.job.manage(**made)
    batch = next(run.job.batches(Numbers(23), global_batch_size=4, micro_batch_size=2, max_steps=2))
    assert run.job.step(made["model"](batch).square().mean()).reason == "Accumulating"
    with pytest.raises(UsageError, match="between two steps"):
        getattr(run.job, call)()
