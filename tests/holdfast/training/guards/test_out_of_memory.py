"""A GPU that is out of memory: the record of it, and jobs of one rank whose steps raise the error of torch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_training import Numbers
from solo_job import Solo

from holdfast.training.guards.out_of_memory import SOON, OutOfMemory, latest, nearly_full
from holdfast.training.step import device_memory
from holdfast.training.step.device_memory import MemoryWatch

Make = Callable[..., Solo]
SIZE, BATCH = 40, 10
GIB = 1 << 30


def after(*steps: int, used: int = 8, requested: int = 8) -> OutOfMemory | None:
    """The record after a GPU was out of memory in these steps, each with the largest micro-batch that it allows."""
    record: OutOfMemory | None = OutOfMemory()
    for step in steps:
        assert record is not None
        record = record.once_more(step, requested=requested, used=min(used, record.limit(requested)))
    return record


def test_first_time_empties_the_caches_and_later_ones_halve_the_micro_batch() -> None:
    assert after(7) == OutOfMemory(times=1, step=7)
    assert after(7, 7) == OutOfMemory(times=2, step=7, micro_batch=4, requested=8)
    assert after(7, 7, 8, 20) == OutOfMemory(times=4, step=20, micro_batch=1, requested=8)
    assert after(7, 7, 8, 20, 20) is None


def test_micro_batch_of_an_odd_size_is_halved_to_the_next_larger_one() -> None:
    record = after(1, 1, used=7)
    assert record is not None
    assert record.micro_batch == 4


def test_share_of_a_rank_below_the_micro_batch_is_halved_instead() -> None:
    record = after(1, 1, used=3, requested=64)
    assert record is not None
    assert record.limit(64) == 2


def test_caches_are_emptied_again_after_many_steps_and_the_limit_stays() -> None:
    assert after(7, 7 + SOON + 1) == OutOfMemory(times=2, step=8 + SOON)
    record = after(7, 7, 8 + SOON)
    assert record == OutOfMemory(times=3, step=8 + SOON, micro_batch=4, requested=8)
    assert after(7, 7 + SOON) == OutOfMemory(times=2, step=7 + SOON, micro_batch=4, requested=8)


def test_time_before_the_last_one_counts_as_soon() -> None:
    """A roll-back or a restart repeats earlier steps."""
    assert after(50, 10) == OutOfMemory(times=2, step=10, micro_batch=4, requested=8)


def test_script_with_its_own_loader_has_only_the_first_response() -> None:
    assert after(7, used=0, requested=0) == OutOfMemory(times=1, step=7)
    assert after(7, 7, used=0, requested=0) is None


def test_limit_applies_only_to_the_size_that_the_script_requested_then() -> None:
    record = OutOfMemory(times=2, micro_batch=4, requested=8)
    assert [record.limit(size) for size in (8, 2, 16)] == [4, 2, 16]
    assert OutOfMemory(times=1).limit(8) == 8


def test_newest_record_has_the_most_times_and_survives_json() -> None:
    once, twice = OutOfMemory(times=1, step=9), OutOfMemory(times=2, step=4, micro_batch=4, requested=8)
    assert latest(once, twice) == latest(twice, once) == twice
    assert OutOfMemory.from_json(twice.to_json()) == twice
    assert OutOfMemory.from_json({}) == OutOfMemory()


# A job of one rank


class Full(torch.autograd.Function):
    """Raises the error of torch in backward, so long as `left` is not 0 and the batch is larger than `fits`."""

    left = 0
    fits = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.size = len(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise_if_full(ctx.size)
        return gradients[0]


def raise_if_full(size: int) -> None:
    if Full.left and size > Full.fits:
        Full.left -= 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    Full.left, Full.fits = 0, 0
    yield
    Full.left = 0


def parts() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).to(torch.float64)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}


class Run:
    """A job that trains some steps, and the sizes of its micro-batches by step."""

    def __init__(self, run: Solo, *, moves_on: bool = True) -> None:
        run.launcher.moves_on = moves_on
        self.run, self.made = run, parts()
        self.results: list[tuple[int, str]] = []
        self.sizes: dict[int, list[int]] = {}
        run.job.manage(**self.made)

    def train(self, steps: int, *, left: dict[int, int] | None = None, fits: int = 0, **more: Any) -> Run:
        """`left`: before a step, for how many tries the memory is full."""
        ahead, job, model = dict(left or {}), self.run.job, self.made["model"]
        Full.left, Full.fits = 0, fits
        sizes = {"global_batch_size": BATCH, "micro_batch_size": 4, **more}
        for batch in job.batches(Numbers(SIZE), max_steps=steps, **sizes):
            Full.left = ahead.pop(job.committed_step + 1, Full.left)
            self.sizes.setdefault(job.committed_step + 1, []).append(len(batch))
            result = job.step(Full.apply(model(batch.double())).square().mean())
            if result.reason != "Accumulating":
                self.results.append((result.step, result.reason))
        return self

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([one.detach().flatten() for one in self.made["model"].parameters()])

    @property
    def messages(self) -> list[tuple[int, int]]:
        return [(body["step"], body["microBatch"]) for body in self.run.launcher.of("outOfMemory")]


def test_step_is_repeated_with_empty_caches_and_the_same_micro_batches(
    solo: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    run = Run(solo(tmp_path / "a")).train(5, left={3: 1})
    assert run.results == [(1, "Committed"), (2, "Committed"), (2, "Retried"), *[(n, "Committed") for n in (3, 4, 5)]]
    assert (run.sizes[3], run.sizes[4]) == ([4, 4, 4, 2], [4, 4, 2])
    assert run.messages == [(2, 0)]
    assert emptied
    assert "rank 0 is out of GPU memory after step 2. All ranks repeat the step with empty caches" in caplog.text
    assert run.run.job.audit().ok
    undisturbed = Run(solo(tmp_path / "b")).train(5)
    assert torch.equal(run.weights, undisturbed.weights)


def test_halved_micro_batches_give_the_same_gradients_and_are_kept(solo: Make, tmp_path: Path) -> None:
    run = Run(solo(tmp_path / "a")).train(6, left={3: 100}, fits=2)
    assert run.messages == [(2, 0), (2, 2)]
    assert run.sizes[3][-5:] == run.sizes[6] == [2, 2, 2, 2, 2]
    assert [step for step, reason in run.results if reason == "Committed"] == [1, 2, 3, 4, 5, 6]
    assert run.run.job.audit().ok
    undisturbed = Run(solo(tmp_path / "b")).train(6)
    assert torch.allclose(run.weights, undisturbed.weights, rtol=1e-12, atol=1e-14)


def test_job_fails_with_advice_if_single_samples_do_not_fit(solo: Make) -> None:
    run = Run(solo(None))
    with pytest.raises(torch.OutOfMemoryError, match=r"cannot be smaller\. .*micro_batch_size.*PYTORCH_ALLOC_CONF"):
        run.train(3, left={2: 100})
    assert run.messages == [(1, 0), (1, 2), (1, 1)]
    (body,) = run.run.launcher.of("exception")
    assert body["name"] == "OutOfMemoryError"
    assert body["message"].endswith("CUDA out of memory. Tried to allocate 2 GiB")


def test_first_step_is_repeated(solo: Make) -> None:
    run = Run(solo(None)).train(2, left={1: 2})
    assert run.results == [(0, "Retried"), (0, "Retried"), (1, "Committed"), (2, "Committed")]
    assert run.sizes[2] == [2, 2, 2, 2, 2]


def test_restart_from_a_checkpoint_keeps_the_limit(solo: Make, tmp_path: Path) -> None:
    first = solo(tmp_path, interval="1")
    Run(first).train(4, left={2: 2})
    first.job.close()
    first.settle()
    again = Run(solo(tmp_path), moves_on=False).train(6)
    assert again.sizes == {5: [2, 2, 2, 2, 2], 6: [2, 2, 2, 2, 2]}
    other = Run(solo(tmp_path), moves_on=False).train(8, micro_batch_size=5)
    assert other.sizes == {7: [5, 5], 8: [5, 5]}


def test_all_ranks_have_the_same_number_of_smaller_micro_batches(solo: Make) -> None:
    run = Run(solo(None)).train(2, left={1: 2}, alike=True, micro_batch_size=3)
    assert run.sizes[2] == [2, 2, 2, 2, 2]


def test_own_loader_repeats_once_and_then_fails(solo: Make) -> None:
    run = Run(solo(None))
    model, job = run.made["model"], run.run.job

    def step() -> str:
        return job.step(Full.apply(model(torch.ones(4, 2, dtype=torch.float64))).square().mean()).reason

    Full.left = 1
    assert [step(), step()] == ["Retried", "Committed"]
    Full.left = 1
    with pytest.raises(torch.OutOfMemoryError, match="the step is not repeated: empty caches did not help"):
        step()


def test_forward_is_covered_in_run_step_and_its_memory_is_freed(solo: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(solo(None))
    job, model = run.run.job, run.made["model"]
    kept: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def look() -> None:
        gc.collect()
        alive.extend(one() is not None for one in kept)

    monkeypatch.setattr("holdfast.training.loop.empty_caches", look)
    Full.left = 2

    def forward(batch: torch.Tensor) -> torch.Tensor:
        hidden = model(batch.double())
        kept[:] = [weakref.ref(hidden)]
        raise_if_full(len(batch))
        return hidden.square().mean()

    batches = job.batches(Numbers(SIZE), global_batch_size=BATCH, micro_batch_size=4, max_steps=2)
    reasons = [job.run_step(lambda batch=batch: forward(batch)).reason for batch in batches]
    assert [reason for reason in reasons if reason != "Accumulating"] == [
        "Retried",
        "Retried",
        "Committed",
        "Committed",
    ]
    assert run.messages == [(0, 0), (0, 2)]
    assert alive == [False, False]


def test_memory_that_is_full_in_the_optimizer_ends_the_script(solo: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(solo(None))

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(run.made["optimizer"], "step", fail)
    with pytest.raises(torch.OutOfMemoryError, match="the optimizer has begun to apply it"):
        run.train(1)
    assert run.messages == []


def test_memory_that_is_full_while_averages_are_adopted_repeats_nothing_that_was_voted(
    solo: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vote may have returned on other ranks, so the prepared step is applied in the next world."""
    from holdfast.training.step.gradient_reducer import Reducer

    adopt, left = Reducer.adopt, [1]

    def fail_once(self: Reducer, touched: Any) -> None:
        if left:
            left.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")
        adopt(self, touched)

    monkeypatch.setattr(Reducer, "adopt", fail_once)
    run = Run(solo(None)).train(3)
    assert run.results == [(1, "Committed"), (2, "Committed"), (3, "Committed")]
    assert run.messages == [(0, 0)]
    assert run.run.job.audit().ok


def test_other_errors_and_those_outside_of_a_step_are_raised_unchanged(solo: Make) -> None:
    run = Run(solo(None))
    job = run.run.job
    batches = job.batches(Numbers(SIZE), global_batch_size=BATCH, micro_batch_size=BATCH, max_steps=2)
    error = RuntimeError("CUDA out of memory")

    def fail() -> torch.Tensor:
        raise error

    next(batches)
    with pytest.raises(RuntimeError) as raised:
        job.run_step(fail)
    assert raised.value is error
    full = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError) as evaluated, job.phase("evaluation"):
        raise full
    assert evaluated.value is full
    assert run.messages == []


def test_script_without_a_launcher_fails_with_advice(solo: Make) -> None:
    run = Run(solo(None))
    run.run.launcher.connected = False
    with pytest.raises(torch.OutOfMemoryError, match=r"there is no launcher \(holdfast run\)"):
        run.train(1, left={1: 1})


# The warning


def test_warning_is_given_above_95_percent_only() -> None:
    assert not nearly_full(allocated=60 * GIB, reserved=76 * GIB, total=80 * GIB)
    text = nearly_full(allocated=60 * GIB, reserved=77 * GIB, total=80 * GIB)
    assert "has reserved 96.2% of 80.0 GiB and used 75.0%" in text
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in text


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices at which a watch looked. Two looks find free memory, and the next ones find little."""
    seen: list[str] = []

    def reserved(device: Any) -> float:
        seen.append(str(device))
        return (9.9 if len(seen) > 2 else 5.0) * GIB

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", reserved)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=10 * GIB))
    return seen


def test_watch_warns_once_and_looks_only_after_some_steps(looks: list[str], caplog: pytest.LogCaptureFixture) -> None:
    watch = MemoryWatch([SimpleNamespace(device="cuda:0", is_cuda=True)])  # type: ignore[list-item]
    warned = []
    for step in range(1, 6 * device_memory._PERIOD):
        watch.look(step)
        warned += [step] if caplog.text.count("cuda:0: GPU memory is nearly full") > len(warned) else []
    assert looks == ["cuda:0"] * 3
    assert warned == [3 * device_memory._PERIOD]


def test_nothing_is_watched_without_a_gpu(looks: list[str]) -> None:
    MemoryWatch([torch.ones(1)]).look(device_memory._PERIOD)
    assert looks == []
