"""A model that is sharded over replicas of two ranks, and ranks that die at a chosen point of a chosen step."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from typing import Any

import torch
from train import Points, hold

import holdfast
from holdfast.training.step import stepper


class Net(torch.nn.Sequential):
    """A model whose sizes two ranks cannot share evenly, with a part that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3), torch.nn.Linear(3, 1))
        self.sometimes = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, 0] > 1
        y = super().forward(x).squeeze(-1)
        return y + self.sometimes.sum() * chosen if bool(chosen.any()) else y


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(job: Any, model: Net, optimizer: torch.optim.Optimizer, faults: str) -> None:
    """Parse `point:slot:step`, separated by commas: die there after that step, or corrupt the weights of this rank
    or be out of GPU memory, once."""
    slot = os.environ["HOLDFAST_SLOT"]
    filled: list[int] = []
    poisoned: list[int] = []
    for point, step in (fault.split(":")[::2] for fault in faults.split(",") if fault.split(":")[1:2] == [slot]):

        def fall(*_: object, at: int = int(step)) -> None:
            if job.committed_step == at:
                die()

        def poison(*_: object, at: int = int(step)) -> None:
            if job.committed_step == at + 1 and at not in poisoned:
                poisoned.append(at)
                model[0].weight.to_local().data[0] = torch.nan

        def fill(*_: object, at: int = int(step)) -> None:
            if job.committed_step == at and at not in filled:
                filled.append(at)
                raise torch.OutOfMemoryError("CUDA out of memory")

        def sleep(*_: object, at: int = int(step)) -> None:
            if job.committed_step == at:
                time.sleep(3600)

        if point == "asleep":
            model[2].register_forward_pre_hook(sleep)
        elif point == "forward":
            model[2].register_forward_pre_hook(fall)
        elif point == "backward":
            model[2].register_full_backward_hook(fall)
        elif point == "memory":
            model[2].register_full_backward_hook(fill)
        elif point == "vote":
            before = stepper.step_commit.voted

            def voted(*args: Any, fall: Any = fall, before: Any = before) -> Any:
                fall()
                return before(*args)

            stepper.step_commit.voted = voted
        elif point == "poison":
            optimizer.register_step_post_hook(poison)
        elif point == "optimizer":
            optimizer.register_step_pre_hook(lambda *_, at=int(step): die() if job.committed_step == at + 1 else None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--hold-at", type=int, nargs="*", default=())
    parser.add_argument("--faults", default="")
    parser.add_argument("--max-roll-backs", type=int, default=0)
    args = parser.parse_args()

    job = holdfast.init(guards=holdfast.Guards(max_roll_backs=args.max_roll_backs))
    torch.manual_seed(job.rank)  # ranks start with different weights: those of rank 0 must be used
    model = Net().to(torch.float64)
    for layer in model:
        if list(layer.parameters()):
            job.fully_shard(layer, size=2)
    job.fully_shard(model, size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    arm(job, model, optimizer, args.faults)
    job.manage(model=model, optimizer=optimizer, max_grad_norm=0.5, group_norms=True)
    results = []
    for x, y in job.batches(Points(), global_batch_size=11, micro_batch_size=2, max_steps=args.steps):
        time.sleep(args.pause)
        hold(job, args.hold_at)
        result = job.step((model(x) - y).square().mean())
        if result.committed:
            results.append([result.loss, result.grad_norm, dict(result.group_norms)])
    told = {
        "losses": results,
        "shard": job.shard,
        "weights": [parameter.to_local().tolist() for parameter in model.parameters()],
        "audit": str(job.audit()),
    }
    os.write(1, f"{json.dumps(told)}\n".encode())  # at once: ranks share their output


if __name__ == "__main__":
    main()
