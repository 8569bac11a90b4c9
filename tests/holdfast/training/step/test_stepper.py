"""How scripts and timing affect a step: a request to leave, a caught exception, a scaler, a lost vote."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed

from holdfast import UsageError
from holdfast.checkpoint.folder.claims import list_claims
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import NonFiniteError, PeerLostError
from holdfast.training.checkpointing.scheduler import CheckpointScheduler
from holdfast.training.distributed.process_group import Group
from holdfast.training.step.stepper import Stepper
from holdfast.training.step.train_state import TrainState

Make = Callable[..., Any]


class Numbers:
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 1.0]) / 10


FORKS = """
import os, sys
import torch, holdfast
job = holdfast.init()
model = torch.nn.Linear(1, 1)
job.manage(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
for batch in job.batches(torch.arange(8.0).unsqueeze(1), global_batch_size=4, micro_batch_size=4, max_steps=4):
    job.step(model(batch).square().mean())
    child = os.fork()
    if child == 0 and job.committed_step % 2:
        sys.exit(3)
    if child == 0:
        raise ValueError("of a child")
    os.waitpid(child, 0)
"""


class Watched(torch.optim.SGD):
    """Run a callback of the test in the middle of its step."""

    inside: Callable[[], None] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> None:
        self.inside()
        super().step(closure)


def parts(**more: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    return {"model": model, "optimizer": Watched(model.parameters(), lr=0.01), **more}


def batches(job: Any, steps: int) -> Any:
    return job.batches(Numbers(), global_batch_size=4, micro_batch_size=4, max_steps=steps)


def loss(made: dict[str, Any], batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = made["model"](batch).square().mean()
    return found


def test_rank_asked_to_leave_in_its_optimizer_step_is_kept(solo: Make) -> None:
    run, made = solo(None), parts()
    run.job.manage(**made)
    said = []
    made["optimizer"].inside = lambda: said.append(run.launcher.parting())
    for batch in batches(run.job, 1):
        run.job.step(loss(made, batch))
    assert [parting.keep for parting in said] == [True]
    assert run.launcher.parting().keep


def test_half_done_optimizer_error_is_reported_even_if_caught(solo: Make, tmp_path: Any) -> None:
    run, made = solo(tmp_path), parts()
    run.job.manage(**made)

    def fails() -> None:
        raise ValueError("no memory for the moments")

    made["optimizer"].inside = fails
    batch = next(batches(run.job, 3))
    with pytest.raises(ValueError, match="moments"):
        run.job.step(loss(made, batch))
    assert not run.launcher.parting().keep
    assert [body["message"] for body in run.launcher.of("exception")] == ["no memory for the moments"]
    with pytest.raises(UsageError, match="let that exception end the script"):
        run.job.save()


@pytest.mark.parametrize("enabled", [True, False])
def test_no_scaler_applies_a_step_that_is_not_finite(solo: Make, enabled: bool) -> None:
    made = parts(scaler=torch.amp.GradScaler("cpu", enabled=enabled))
    run = solo(None)
    run.job.manage(**made)
    outcomes = []
    for batch in batches(run.job, 3):
        before = made["model"].weight.clone()
        factor = float("nan") if len(outcomes) == 1 else 1.0
        result = run.job.step(loss(made, batch) * factor)
        outcomes.append((result.reason, torch.equal(before, made["model"].weight)))
    assert outcomes == [("Committed", False), ("NonFinite", True), ("Committed", False)]


@pytest.mark.parametrize("enabled", [True, False])
def test_ten_non_finite_losses_end_the_script_with_a_scaler_too(solo: Make, enabled: bool) -> None:
    run, made = solo(None), parts(scaler=torch.amp.GradScaler("cpu", enabled=enabled))
    run.job.manage(**made)
    reasons = [run.job.step(loss(made, torch.ones(3, 2)) * torch.nan).reason for _ in range(9)]
    assert reasons == ["NonFinite"] * 9
    with pytest.raises(NonFiniteError, match="10 steps in a row"):
        run.job.step(loss(made, torch.ones(3, 2)) * torch.nan)
    assert run.job.committed_step == 10


class Narrow(torch.autograd.Function):
    """The identity, with a gradient that overflows above a limit, as in half precision."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, limit: float) -> torch.Tensor:
        ctx.limit = limit
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient.where(gradient <= ctx.limit, torch.inf), None


def narrow(made: dict[str, Any], limit: float) -> torch.Tensor:
    found: torch.Tensor = Narrow.apply(made["model"].bias.sum(), limit)  # type: ignore[no-untyped-call]
    return found


def test_overflow_under_a_falling_scale_is_no_case_for_the_guards(solo: Make) -> None:
    made = parts(scaler=torch.amp.GradScaler("cpu", init_scale=2.0**24))
    run = solo(None)
    run.job.manage(**made)
    reasons = [run.job.step(narrow(made, 4.0)).reason for _ in range(23)]
    assert reasons == ["NonFinite"] * 22 + ["Committed"]
    assert made["scaler"].get_scale() == 4.0
    assert not run.launcher.of("skipped")


def test_gradients_that_overflow_under_any_scale_end_the_script(solo: Make) -> None:
    made = parts(scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    run = solo(None)
    run.job.manage(**made)
    reasons = [run.job.step(narrow(made, 0.0)).reason for _ in range(11)]
    assert reasons == ["NonFinite"] * 11, "two steps halve the scale to 1; only those after them count"
    with pytest.raises(NonFiniteError, match="10 steps in a row"):
        run.job.step(narrow(made, 0.0))


def draw() -> list[float]:
    """Draw from each generator. Each draws an odd number of normal numbers, and keeps the second one of a pair."""
    python = [random.random(), random.gauss(0, 1)]
    return [*python, np.random.rand(), np.random.randn(), *torch.rand(3).tolist(), float(torch.randn(1))]


@pytest.mark.parametrize("own_loader", [False, True])
def test_a_discarded_step_leaves_no_trace_in_the_random_generators(
    solo: Make, monkeypatch: pytest.MonkeyPatch, own_loader: bool
) -> None:
    """The step is discarded twice, after different numbers of draws."""
    run, made = solo(None, attempt_id=AttemptId(1, 1)), parts()
    run.launcher.moves_on = True
    run.job.manage(**made)
    finish, lost = Stepper.finish, []

    def breaks(stepper: Stepper, samples: int | None) -> Any:
        if run.job.committed_step == 1 and len(lost) < 2:
            lost.append([draw() for _ in lost])
            raise PeerLostError("cut")
        return finish(stepper, samples)

    monkeypatch.setattr(Stepper, "finish", breaks)
    drawn: dict[int, list[list[float]]] = {}
    for batch in [torch.ones(4, 2)] * 5 if own_loader else batches(run.job, 3):
        drawn.setdefault(run.job.committed_step, []).append(draw())
        run.job.step(loss(made, batch))
    assert [len(tries) for tries in drawn.values()] == [1, 3, 1]
    assert drawn[1] == [drawn[1][0]] * 3
    assert len({number for tries in drawn.values() for number in tries[0]}) == 24, "each step has other numbers"


def test_a_step_that_is_applied_from_a_doubt_tells_its_loss(solo: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = parts(scaler=torch.amp.GradScaler("cpu"))
    run = solo(None, attempt_id=AttemptId(1, 1))
    run.launcher.moves_on = True
    run.job.manage(**made)
    vote, calm = Group.launch_sum, []

    def breaks(group: Group, tensor: torch.Tensor) -> Any:
        if run.job.committed_step == 2 and tensor.shape == (1,) and not calm:
            calm.append(True)
            raise PeerLostError("cut")
        return vote(group, tensor)

    monkeypatch.setattr(Group, "launch_sum", breaks)
    results = [run.job.step(loss(made, batch)) for batch in batches(run.job, 5)]
    assert calm
    assert [(result.step, result.reason) for result in results] == [(n, "Committed") for n in (1, 2, 3, 4, 5)]
    assert all(result.loss is not None and result.grad_norm is not None for result in results)
    assert run.job.audit().ok


@pytest.mark.parametrize(
    ("after", "commits"),
    [
        (True, [4, 6]),  # a peer with the vote lost its save with the old world: its next call is a step
        (False, [3, 6]),  # all ranks start the next batch, and save
    ],
)
def test_save_after_a_step_that_ended_elsewhere_follows_the_next(
    solo: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, after: bool, commits: list[int]
) -> None:
    """The step ended in another world."""
    run, made = solo(tmp_path, attempt_id=AttemptId(1, 1)), parts()
    run.launcher.moves_on = True
    run.job.manage(**made)
    stepped, lost = TrainState.stepped, []

    def breaks(state: TrainState, attempt_id: AttemptId) -> None:
        if run.job.committed_step == 2 and not lost:
            lost.append(True)
            raise PeerLostError("cut")
        stepped(state, attempt_id)

    monkeypatch.setattr(TrainState, "stepped", breaks)
    told = []
    for batch in batches(run.job, 6):
        if not after and run.job.committed_step == 3:
            told.append(run.job.save())
        result = run.job.step(loss(made, batch))
        if after and run.job.committed_step == 3:
            told.append(run.job.save())
        assert result.committed
    assert (lost, told) == ([True], [not after])
    assert [body["step"] for body in run.launcher.of("checkpoint")] == commits
    assert run.job.audit().ok


def test_save_losing_a_peer_before_a_step_repeats_the_batch(
    solo: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The batch is provided again."""
    run, made = solo(tmp_path, attempt_id=AttemptId(1, 1)), parts()
    run.launcher.moves_on = True
    run.job.manage(**made)
    save, lost = CheckpointScheduler.save, []

    def breaks(*arguments: Any, **more: Any) -> Any:
        if not lost:
            lost.append(True)
            raise PeerLostError("cut")
        return save(*arguments, **more)

    monkeypatch.setattr(CheckpointScheduler, "save", breaks)
    results = []
    for batch in batches(run.job, 3):
        if run.job.committed_step == 1:
            run.job.save()
        results.append(run.job.step(loss(made, batch)))
    assert [(result.step, result.reason) for result in results] == [
        (1, "Committed"),
        (1, "Retried"),
        (2, "Committed"),
        (3, "Committed"),
    ]
    assert run.job.audit().ok


def test_save_interrupted_by_a_lost_peer_follows_the_next_step(
    solo: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    run, made = solo(tmp_path, attempt_id=AttemptId(1, 1), interval="4"), parts()
    run.launcher.moves_on = True
    run.job.manage(**made)
    begin, lost = CheckpointManager.begin, []

    def breaks(*arguments: Any, **more: Any) -> Any:
        if not lost:
            lost.append(run.job.committed_step)
            raise PeerLostError("cut")
        return begin(*arguments, **more)

    monkeypatch.setattr(CheckpointManager, "begin", breaks)
    for batch in batches(run.job, 7):
        run.job.step(loss(made, batch))
    assert lost == [4]
    assert [body["step"] for body in run.launcher.of("checkpoint")] == [5, 7], "the last one ends the loop"


def test_claim_interrupted_by_a_lost_peer_is_made_next_attempt(
    solo: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    run, made = solo(tmp_path, attempt_id=AttemptId(1, 1)), parts()
    run.launcher.moves_on, run.launcher.generation = True, 2
    run.job.manage(**made)
    claim, lost = CheckpointManager.claim, []

    def breaks(*arguments: Any, **more: Any) -> Any:
        if not lost:
            lost.append(True)
            raise PeerLostError("cut")
        return claim(*arguments, **more)

    monkeypatch.setattr(CheckpointManager, "claim", breaks)
    for batch in batches(run.job, 4):
        if run.job.committed_step == 2 and not lost:
            run.launcher.cancel.set("a new generation")
        run.job.step(loss(made, batch))
    assert lost
    assert [str(claim.attempt_id) for claim in list_claims(tmp_path)] == ["1.1", "2.3"], (
        "the claim of g2.a2 was never written"
    )
    assert run.launcher.of("restored")[-1]["source"] == "memory"


def test_second_loop_after_the_end_is_refused_while_steps_remain(solo: Make) -> None:
    job = solo(None).job
    made = parts()
    job.manage(**made)
    for batch in batches(job, 2):
        job.step(loss(made, batch))
    assert list(batches(job, 2)) == []
    with pytest.raises(UsageError, match="train all steps in one loop"):
        batches(job, 4)


def test_a_process_that_the_script_forks_ends_without_a_word(launcher: Any, tmp_path: Path) -> None:
    """By `sys.exit` or by an exception. The connection to the launcher belongs to the parent."""
    launcher.script = tmp_path / "forks.py"
    launcher.script.write_text(FORKS)
    launcher.start(1, tmp_path / "tier")
    assert launcher.finish() == [0], launcher.output()
    assert launcher.of(0, "exception") == []
    assert [message["step"] for message in launcher.of(0, "done")] == [4]


# What a script does next to the loop, and in mid-run


def thaws(made: dict[str, Any]) -> None:
    made["model"].bias.requires_grad_(True)


def trains_more(made: dict[str, Any]) -> None:
    made["optimizer"].add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


def is_converted(made: dict[str, Any]) -> None:
    made["model"].double()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (thaws, "freeze it afterwards"),
        (trains_more, "the optimizer got a parameter during the run"),
        (is_converted, "changed its dtype or device during the run"),
    ],
)
def test_change_that_averaging_cannot_follow_is_refused(
    solo: Make, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    """The next step raises the error, and is not applied."""
    run, made = solo(None), parts()
    made["model"].bias.requires_grad_(False)
    run.job.manage(**made)
    some = torch.ones(3, 2)
    run.job.step(loss(made, some))
    weight = made["model"].weight.clone()
    change(made)
    with pytest.raises(UsageError, match=message):
        run.job.step(loss(made, some.to(made["model"].weight.dtype)))
    assert run.job.committed_step == 1
    assert torch.equal(made["model"].weight, weight.to(made["model"].weight.dtype))
    assert [body["name"] for body in run.launcher.of("exception")] == ["UsageError"], "nobody waits for this rank"


def test_managed_layer_may_be_added_to_the_optimizer_later(solo: Make) -> None:
    run, made = solo(None), parts()
    made["optimizer"] = torch.optim.SGD([made["model"].weight], lr=0.01)
    run.job.manage(**made)
    some = torch.ones(3, 2)
    run.job.step(loss(made, some))
    before = made["model"].bias.clone()
    made["optimizer"].add_param_group({"params": [made["model"].bias], "lr": 0.01})
    assert run.job.step(loss(made, some)).committed
    assert not torch.equal(made["model"].bias, before)


@pytest.fixture
def own_group() -> Iterator[Callable[[], None]]:
    """Provide a default process group of the script, and remove it afterwards."""
    store = torch.distributed.HashStore()
    yield lambda: torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_script_may_use_a_process_group_of_its_own(solo: Make, own_group: Callable[[], None]) -> None:
    """With such a group, a rank cannot enter another world: torch's default group does not outlive a peer."""
    run, made = solo(None), parts()
    run.job.manage(**made)
    kept = []
    for batch in batches(run.job, 4):
        if run.job.committed_step == 1:
            own_group()
        total = torch.ones(1)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)
        run.job.step(loss(made, batch) * total)
        kept.append(run.launcher.parting().keep)
        if run.job.committed_step == 3:
            torch.distributed.destroy_process_group()
    assert kept == [True, False, False, True]
    assert run.job.audit().ok
