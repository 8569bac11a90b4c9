"""`job.run_step`: which errors of its collectives repeat the step. `holdfast.Trainer` runs the same loop."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_training import Numbers, parts

import holdfast
from holdfast import PeerLostError, UsageError
from holdfast.training.checkpointing.scheduler import CheckpointScheduler
from holdfast.training.distributed.cancel_token import CancelToken
from holdfast.training.launcher_client import exception_reporter

Make = Callable[..., Any]
GONE = "[../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4711"
BROKEN = [RuntimeError(GONE), dist.DistBackendError("NCCL error"), dist.DistNetworkError("no answer")]
OWN = [ValueError("a bad batch"), RuntimeError("CUDA out of memory"), KeyError("text")]
SIZES = {"global_batch_size": 5, "micro_batch_size": 2, "max_steps": 8}


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 1).square().mean()


def trainer(**changes: Any) -> holdfast.Trainer:
    return holdfast.Trainer(**{**parts(), "loss": loss_of, "dataset": Numbers(), **SIZES, **changes})


@pytest.mark.parametrize("error", BROKEN, ids=repr)
def test_broken_collective_is_a_lost_peer_once_launchers_agree(error: Exception) -> None:
    said, later = CancelToken(), CancelToken()
    said.set("rank 1 is gone")
    assert exception_reporter.lost(error, cancel=said, single_rank=False) == "rank 1 is gone"
    threading.Timer(0.2, later.set, ["rank 2 is gone"]).start()
    assert exception_reporter.lost(error, cancel=later, single_rank=False) == "rank 2 is gone"


def test_broken_collective_without_a_report_is_a_script_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launchers report no lost peer."""
    monkeypatch.setattr(exception_reporter, "_DECISION_SECONDS", 0.2)
    assert not exception_reporter.lost(BROKEN[0], cancel=CancelToken(), single_rank=False)


@pytest.mark.parametrize("error", OWN, ids=repr)
def test_script_error_is_not_waited_for_and_is_no_lost_peer(error: Exception) -> None:
    cancel = CancelToken()
    began = time.monotonic()
    assert not exception_reporter.lost(error, cancel=cancel, single_rank=False)
    assert not exception_reporter.lost(BROKEN[0], cancel=cancel, single_rank=True), "a world of one has no peer"
    assert time.monotonic() - began < 5
    cancel.set("rank 1 is gone")
    assert not exception_reporter.lost(error, cancel=cancel, single_rank=False)


def test_error_in_fn_is_raised_unchanged_and_batch_is_repeatable(solo: Make) -> None:
    run, made = solo(None), parts()
    run.job.manage(**made)
    bad = ValueError("a bad batch")

    def fail() -> torch.Tensor:
        raise bad

    batches = run.job.batches(Numbers(), **{**SIZES, "max_steps": 1, "micro_batch_size": 5})
    batch = next(batches)
    with pytest.raises(ValueError, match="a bad batch") as raised:
        run.job.run_step(fail)
    assert raised.value is bad
    assert run.job.run_step(lambda: loss_of(made["model"], batch)).committed
    assert list(batches) == []


def test_a_collective_that_broke_is_retried_and_its_graph_let_go(solo: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run, made = solo(None), parts()
    run.job.manage(**made)
    kept: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []
    run.launcher.moves_on = True
    monkeypatch.setattr(exception_reporter, "lost", lambda error, **_: str(error))

    def lose_peers(message: str) -> None:
        gc.collect()
        alive.extend(one() is not None for one in kept)

    monkeypatch.setattr(run.launcher, "lose_peers", lose_peers)
    batch = next(run.job.batches(Numbers(), **SIZES))

    def forward() -> torch.Tensor:
        hidden = made["model"](batch)
        kept.append(weakref.ref(hidden))
        raise RuntimeError(GONE)

    assert run.job.run_step(forward).reason == "Retried"
    assert alive == [False]


def lose_a_peer(*_: Any, **more: Any) -> None:
    raise PeerLostError("rank 1 is gone")


class BreaksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(GONE)


def test_a_collective_that_broke_in_backward_is_retried_too(solo: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run, made = solo(None), parts()
    run.launcher.moves_on = True
    run.job.manage(**made)
    monkeypatch.setattr(exception_reporter, "lost", lambda error, **_: str(error))
    batch = next(run.job.batches(Numbers(), **SIZES))
    retried = holdfast.StepResult(committed=False, step=0, reason="Retried")
    assert run.job.run_step(lambda: BreaksInBackward.apply(loss_of(made["model"], batch))) == retried
    assert not run.launcher.of("exception")


def test_without_a_batch_fn_is_not_called(solo: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = solo(tmp_path)
    run.launcher.moves_on = True
    run.job.manage(**parts())
    batches = run.job.batches(Numbers(), **SIZES)
    next(batches)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointScheduler, "save", lose_a_peer)
        assert not run.job.save()
    assert run.launcher.places == 2
    assert run.job.run_step(lambda: pytest.fail("peers are not in fn")).reason == "Retried"


def test_a_trainer_makes_the_bits_of_the_loop_written_out(solo: Make) -> None:
    written, made = solo(None).job, parts()
    written.manage(**made, max_grad_norm=1.0, group_norms=True)
    expected = [written.step(loss_of(made["model"], batch)) for batch in written.batches(Numbers(), seed=3, **SIZES)]
    seen: list[Any] = []
    wrapped = trainer(job=solo(None).job, seed=3, max_grad_norm=1.0, group_norms=True, on_step=seen.append)
    job = wrapped.fit()
    assert seen == expected
    assert {len(result.group_norms) for result in seen if result.committed} == {1}
    assert job.audit().ok
    for mine, theirs in zip(wrapped.model.parameters(), made["model"].parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_trainer_evaluates_at_its_steps_and_says_so(solo: Make) -> None:
    run, steps = solo(None), []

    def evaluate(model: torch.nn.Module) -> None:
        steps.append((run.job.committed_step, run.launcher.of("phase")[-1]["phase"]))

    trainer(job=run.job, evaluate=evaluate, evaluate_every=3).fit()
    assert steps == [(3, "evaluation"), (6, "evaluation")]


@pytest.mark.parametrize(
    ("changes", "field", "mend"),
    [
        ({"model": 1}, "model is", "expected a torch.nn.Module"),
        ({"optimizer": "adam"}, "optimizer is", "expected a torch.optim.Optimizer"),
        ({"loss": 0.5}, "loss is", "expected a function of the model and a batch"),
        ({"dataset": iter([1])}, "dataset is", "expected one with __len__"),
        ({"global_batch_size": 0}, "global_batch_size is 0", "expected an integer"),
        ({"micro_batch_size": 1.5}, "micro_batch_size is 1.5", "expected an integer"),
        ({"max_steps": -1}, "max_steps is -1", "expected an integer"),
        ({"others": [1]}, "others is", "expected a dict"),
        ({"on_step": 1}, "on_step is", "expected a function"),
        ({"evaluate": print}, "evaluate_every is missing", "together"),
        ({"evaluate_every": 3}, "evaluate is missing", "together"),
        ({"evaluate": print, "evaluate_every": 0}, "evaluate_every is 0", "expected an integer"),
    ],
)
def test_a_trainer_refuses_what_cannot_work_by_the_fields_name(
    changes: dict[str, Any], field: str, mend: str
) -> None:
    with pytest.raises(UsageError, match=field) as raised:
        trainer(**changes)
    assert mend in str(raised.value)
