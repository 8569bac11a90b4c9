"""If a script fails on every rank, its last step is saved. If it fails on some ranks, the others keep the state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from holdfast import Guards
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.restore.search import restore
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import CheckpointError, NonFiniteError, UsageError
from holdfast.training.checkpointing import final_checkpoint
from holdfast.training.checkpointing.final_checkpoint import FailingRank
from holdfast.training.distributed.process_group import store_client

Make = Callable[..., Any]


class Average:
    """An average that the script keeps."""

    def __init__(self) -> None:
        self.values = [0.0, 0.0]

    def update(self) -> None:
        self.values[0] += 1.0
        raise ValueError("no second value")

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])


class Script:
    """A script with running statistics whose steps a test runs one by one."""

    def __init__(self, job: Any, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.job = job
        self.average = Average()
        self.model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)  # type: ignore[call-arg]
        job.manage(model=self.model, optimizer=self.optimizer, average=self.average)

    def forward(self, scale: float = 1.0) -> torch.Tensor:
        return self.model(scale * torch.randn(4, 2)).square().mean()  # type: ignore[no-any-return]

    def make(self, count: int) -> None:
        for _ in range(count):
            self.job.step(self.forward())

    def fail(self, raises: Callable[[], Any]) -> None:
        """Fail as the interpreter does at the end of a script that raised."""
        trace: TracebackType | None = None
        with pytest.raises(Exception) as raised:  # noqa: PT011
            raises()
        trace = raised.value.__traceback__
        self.job.close(failed=lambda: True, trace=lambda: trace)


def bad_batch() -> None:
    raise ValueError("row 7 has no label")


def committed(run: Any) -> list[int]:
    return [body["step"] for body in run.launcher.of("checkpoint") if body["result"] == "Committed"]


def names(root: Path) -> set[str]:
    return {path.name for path in root.glob("step-*")}


def test_last_step_is_saved_as_it_was_before_the_failed_step(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path, attempt_id=AttemptId(1, 1))
    script = Script(run.job)
    script.make(3)
    expected = {name: tensor.clone() for name, tensor in script.model.state_dict().items()}
    generator = torch.get_rng_state()
    script.forward(scale=100.0)  # its running statistics and random numbers do not belong to any completed step
    script.fail(bad_batch)
    assert committed(run) == [3]
    assert [body["step"] for body in run.launcher.of("lastCommit")] == [3]

    again = solo(tmp_path, attempt_id=AttemptId(1, 2))
    other = Script(again.job)
    assert again.job.committed_step == 3
    assert torch.equal(torch.get_rng_state(), generator)
    for name, tensor in other.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_the_commit_before_stays_whatever_retention_says(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path, interval="2", keep_last=1, attempt_id=AttemptId(1, 1))
    script = Script(run.job)
    script.make(5)
    script.fail(bad_batch)
    assert names(tmp_path) == {"step-4.g1.a1", "step-5.g1.a1"}


def test_what_is_durable_already_is_not_committed_again(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path, interval="2", attempt_id=AttemptId(1, 1))
    script = Script(run.job)
    script.make(3)
    assert run.job.save()
    script.fail(bad_batch)
    assert committed(run) == [2, 3]
    assert run.launcher.of("lastCommit") == []


def test_skipped_steps_count_and_the_last_good_weights_are_saved(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path, attempt_id=AttemptId(1, 1), guards=Guards(max_roll_backs=0))
    script = Script(run.job)
    script.make(2)
    weights = [parameter.clone() for parameter in script.model.parameters()]

    def diverge() -> None:
        while True:
            run.job.step(script.forward() * torch.nan)

    script.fail(diverge)
    assert committed(run) == [12]
    found = restore(tmp_path, SingleRank(), job_uid="me").loaded
    assert found is not None
    assert bytes(found.tensors["model/1.weight"]) == weights[2].detach().numpy().tobytes()


def poison(script: Script) -> None:
    """Set one value of a weight to NaN without a write that torch counts."""
    script.model[1].weight.data[0, 1] = torch.nan


def test_non_finite_weights_end_the_script_and_are_never_saved(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path, interval="2", attempt_id=AttemptId(1, 1), guards=Guards(max_roll_backs=0))
    script = Script(run.job)
    script.make(2)
    poison(script)
    with pytest.raises(NonFiniteError, match=r"^model\.1\.weight holds values that are not finite"):
        script.make(1)
    script.fail(bad_batch)
    assert run.job.committed_step == 3
    assert committed(run) == [2]
    assert names(tmp_path) == {"step-2.g1.a1"}


@pytest.mark.parametrize("full_every", [1, 4], ids=["full", "delta"])
def test_save_of_non_finite_weights_fails_and_replaces_nothing(solo: Make, tmp_path: Path, full_every: int) -> None:
    """The message names the tensor."""
    run = solo(tmp_path, keep_last=1, attempt_id=AttemptId(1, 1), full_every=full_every)
    script = Script(run.job)
    script.make(2)
    assert run.job.save()
    script.make(1)
    poison(script)
    assert not run.job.save()
    (told,) = (body for body in run.launcher.of("checkpoint") if body["result"] == "Failed")
    assert told["cause"] == "NonFinite"
    assert told["message"].startswith("rank 0: model/1.weight holds values that are not finite")
    assert names(tmp_path) == {"step-2.g1.a1"}
    with torch.no_grad():
        script.model[1].weight[0, 1] = 0.0
    assert run.job.save()


def test_intentional_non_finite_weights_get_advice_to_freeze(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path, attempt_id=AttemptId(1, 1))
    script = Script(run.job)
    script.make(1)
    poison(script)
    assert [run.job.save(), run.job.save()] == [False, False]
    with pytest.raises(CheckpointError, match=r"3 checkpoints in a row.*freeze the parameters"):
        run.job.save()
    script.model[1].weight.data.zero_()
    assert run.job.save(), "whoever mends the weights after all may save again"


def test_storage_outage_does_not_count_as_non_finite_weights(solo: Make, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    run = solo(root, attempt_id=AttemptId(1, 1))
    script = Script(run.job)
    script.make(1)
    root.rename(tmp_path / "away")
    root.write_text("a file in its place")
    assert [run.job.save(), run.job.save()] == [False, False]
    root.unlink()
    poison(script)
    assert [run.job.save(), run.job.save()] == [False, False], "of three in a row only two are for the weights"


def test_unreadable_state_is_not_saved_and_the_end_is_reported(
    solo: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the GPU has this effect."""
    run = solo(tmp_path, attempt_id=AttemptId(1, 1))
    script = Script(run.job)
    script.make(2)

    def lost(*_: object) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch, "equal", lost)
    script.fail(bad_batch)
    assert committed(run) == []
    assert "step 2 is not saved: the state cannot be read" in caplog.text


def test_non_finite_numbers_that_are_no_weights_may_be_saved(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path, attempt_id=AttemptId(1, 1))
    script = Script(run.job)
    script.model.register_buffer("mask", torch.full((3,), -torch.inf))
    script.average.values[1] = torch.inf
    script.make(1)
    assert run.job.save()


def by_copy(weight: torch.nn.Parameter, value: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(value)


def past_the_count(weight: torch.nn.Parameter, value: torch.Tensor) -> None:
    weight.data.copy_(value)


def by_memory(weight: torch.nn.Parameter, value: torch.Tensor) -> None:
    weight.data = value.clone()


Swap = Callable[[torch.nn.Parameter, torch.Tensor], None]
swaps = pytest.mark.parametrize("swap", [by_copy, past_the_count, by_memory])


@contextmanager
def averaged(script: Script, swap: Swap) -> Iterator[None]:
    """Swap the averaged weights in, as libraries do for an evaluation."""
    before = [parameter.detach().clone() for parameter in script.model.parameters()]
    for parameter in script.model.parameters():
        swap(parameter, 0.9 * parameter.detach())
    yield
    for parameter, value in zip(script.model.parameters(), before, strict=True):
        swap(parameter, value)


@swaps
def test_state_with_averaged_weights_in_place_is_not_saved(
    solo: Make, tmp_path: Path, swap: Swap, caplog: pytest.LogCaptureFixture
) -> None:
    run = solo(tmp_path, interval="2", attempt_id=AttemptId(1, 1))
    script = Script(run.job)
    script.make(3)

    def evaluate() -> None:
        with run.job.phase("evaluation"), averaged(script, swap):
            bad_batch()

    script.fail(evaluate)
    assert committed(run) == [2]
    assert "step 3 is not saved: the script changed the weights" in caplog.text


@swaps
def test_averaged_weights_that_were_taken_back_cost_no_commit(solo: Make, tmp_path: Path, swap: Swap) -> None:
    run = solo(tmp_path, attempt_id=AttemptId(1, 1))
    script = Script(run.job)
    script.make(3)
    with run.job.phase("evaluation"), averaged(script, swap):
        pass
    script.fail(bad_batch)
    assert committed(run) == [3]


def test_save_in_evaluation_with_averaged_weights_is_refused(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path, attempt_id=AttemptId(1, 1))
    script = Script(run.job)
    script.make(3)
    with run.job.phase("evaluation"):
        with averaged(script, past_the_count), pytest.raises(UsageError, match="not hold the weights of step 3"):
            run.job.save(metrics={"val_loss": 1.0})
        assert names(tmp_path) == set()
        assert run.job.save(metrics={"val_loss": 1.0})


def test_save_of_weights_the_script_changed_is_made_and_logged(
    solo: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The script may clip its weights after each step, and it requests the save itself."""
    run = solo(tmp_path, attempt_id=AttemptId(1, 1))
    script = Script(run.job)
    script.model.load_state_dict(script.model.state_dict())
    by_copy(script.model[1].weight, torch.tensor([[0.5, 0.25]]))
    assert run.job.save(), "where training begins is for the script to say"
    script.make(1)
    assert run.job.save()
    assert "outside of the optimizer" not in caplog.text
    script.make(1)
    by_copy(script.model[1].weight, script.model[1].weight.clamp(-0.01, 0.01))
    assert run.job.save()
    assert "the checkpoint of step 2 holds weights that the script changed after that step" in caplog.text


class Tears(torch.optim.SGD):
    """An optimizer that fails after it has changed something."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.param_groups[0].setdefault("count", 0) == 2:
            raise RuntimeError("out of memory")
        self.param_groups[0]["count"] += 1
        return None


def test_state_of_a_half_finished_optimizer_step_is_not_saved(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path, attempt_id=AttemptId(1, 1))
    script = Script(run.job, Tears)
    script.fail(lambda: script.make(5))
    assert committed(run) == []
    assert names(tmp_path) == set()


def test_state_of_an_object_during_its_own_update_is_not_saved(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path, attempt_id=AttemptId(1, 1))
    script = Script(run.job)
    script.make(2)
    script.fail(script.average.update)
    assert committed(run) == []


def test_without_a_step_there_is_nothing_to_commit(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path, attempt_id=AttemptId(1, 1))
    Script(run.job).fail(bad_batch)
    assert committed(run) == []


# Several ranks


def test_two_ranks_that_both_fail_commit_and_leave_only_then(launcher: Any, tmp_path: Path) -> None:
    root = tmp_path / "tier"
    launcher.start(2, root, "--raise-at", "3", "--all-raise")
    assert launcher.finish() == [1, 1], launcher.output()
    for slot in (0, 1):
        (commit,) = launcher.of(slot, "checkpoint")
        assert (commit["step"], commit["result"]) == (3, "Committed"), launcher.output()
        assert [said["step"] for said in launcher.of(slot, "lastCommit")] == [3]
        assert launcher.of(slot, "done") == []
    assert names(root) == {"step-3.g1.a1"}
    found = restore(root, SingleRank(), job_uid="job-1").loaded
    assert found is not None
    assert found.manifest.world_size == 2


def test_single_failed_rank_saves_nothing(launcher: Any, tmp_path: Path) -> None:
    """The other rank keeps the state."""
    launcher.start(2, tmp_path / "tier", "--raise-at", "3")
    assert launcher.processes[1].wait() == 1
    launcher.wait("the survivor to leave", lambda: bool(launcher.of(0, "left")))
    assert launcher.of(1, "lastCommit") == []
    assert names(tmp_path / "tier") == set()


# How ranks find each other


@pytest.fixture
def connect() -> Callable[[], Any]:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: (server, store_client("127.0.0.1", server.port, "failing", 60.0))[1]


def ask(connect: Callable[[], Any], left: dict[int, FailingRank], size: int) -> dict[int, tuple[FailingRank, ...]]:
    found: dict[int, tuple[FailingRank, ...]] = {}

    def look(rank: int) -> None:
        found[rank] = final_checkpoint.together(connect(), left[rank], rank=rank, size=size)

    threads = [threading.Thread(target=look, args=(rank,)) for rank in left]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_all_hear_of_all(connect: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final_checkpoint, "LOOK_SECONDS", 60.0)
    left = {rank: FailingRank(step=7, complete=rank != 1) for rank in range(3)}
    found = ask(connect, left, 3)
    assert found == dict.fromkeys(range(3), (left[0], left[1], left[2]))
    assert not final_checkpoint.can_be_saved(found[0])


def test_where_one_is_missing_nobody_saves(connect: Callable[[], Any]) -> None:
    whole = FailingRank(step=7, complete=True)
    assert ask(connect, {0: whole, 2: whole}, 3) == {0: (), 2: ()}


def test_who_comes_after_the_others_gave_up_saves_nothing_either(connect: Callable[[], Any]) -> None:
    whole = FailingRank(step=7, complete=True)
    assert ask(connect, {0: whole}, 2) == {0: ()}
    assert ask(connect, {1: whole}, 2) == {1: ()}


def test_rank_its_launcher_waits_for_does_not_look_for_others(
    connect: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final_checkpoint, "LOOK_SECONDS", 3600.0)
    own = FailingRank(step=7, complete=True)
    assert final_checkpoint.together(connect(), own, rank=0, size=2, hurried=lambda: True) == ()


@pytest.mark.parametrize(
    ("left", "good"),
    [
        ([FailingRank(step=7, complete=True), FailingRank(step=7, complete=True)], True),
        ([FailingRank(step=7, complete=True), FailingRank(step=7, complete=False)], False),
        ([FailingRank(step=7, complete=True), FailingRank(step=8, complete=True)], False),
    ],
    ids=["one state", "one half changed", "a step apart"],
)
def test_only_one_whole_state_is_saved(left: list[FailingRank], good: bool) -> None:
    assert final_checkpoint.can_be_saved(left) is good


@pytest.mark.parametrize(
    ("left", "same"),
    [
        ([FailingRank(step=7, complete=False, saves=2), FailingRank(step=8, complete=True, saves=2)], True),
        ([FailingRank(step=7, complete=True, saves=2), FailingRank(step=7, complete=True, saves=1)], False),
        ([], False),
    ],
    ids=["all began the same saves", "one began a save alone", "not all failed"],
)
def test_only_a_save_that_all_began_is_waited_for(left: list[FailingRank], same: bool) -> None:
    assert final_checkpoint.alike(left) is same
