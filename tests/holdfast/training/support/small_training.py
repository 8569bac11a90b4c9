"""A model and data that are trained in milliseconds."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from typing import Any

import torch

from holdfast.training.data import sample_at


class Numbers:
    def __init__(self, size: int = 23) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 1.0]) / 10


class RecordedNumbers(Numbers):
    """Numbers that record each read. Subclasses decide what is wrong with the `bad` ones."""

    def __init__(self, size: int, bad: Collection[int]) -> None:
        super().__init__(size)
        self.bad = bad
        self.read: list[int] = []

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return super().__getitem__(index)


def order(samples: int, size: int) -> list[int]:
    """The first samples of a dataset in the order in which steps use them."""
    return [sample_at(place, size=size, seed=0)[1] for place in range(samples)]


def parts() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
    }


def train(job: Any, steps: int, *, stop_at: int | None = None, seed: int = 3) -> list[tuple[int, float]]:
    """Train to `steps`. `stop_at` simulates a crash there."""
    made = parts()
    job.manage(**made)
    losses = []
    for batch in job.batches(Numbers(), global_batch_size=5, micro_batch_size=2, max_steps=steps, seed=seed):
        result = job.step((made["model"](batch) - 1).square().mean())
        if result.committed:
            losses.append((result.step, result.loss))
        if result.committed and result.step == stop_at:
            break
    return losses


def told_of(run: Any, request: str, *, step: int = 0) -> None:
    """Wait until the save of this step or a later one has answered a request and has ended."""
    deadline = time.monotonic() + 240
    while not any(request in body["ids"] and body["step"] >= step for body in run.launcher.of("checkpoint")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.settle()


def steps(job: Any, made: dict[str, Any], most: int) -> Iterator[int]:
    """Yield each step after its completion."""
    for batch in job.batches(Numbers(), global_batch_size=4, micro_batch_size=4, max_steps=most):
        yield job.step(made["model"](batch).square().mean()).step


def outcomes(run: Any) -> list[tuple[int, str]]:
    return [(body["step"], body["result"]) for body in run.launcher.of("checkpoint")]
