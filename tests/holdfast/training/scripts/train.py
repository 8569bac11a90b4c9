"""A typical user script in double precision, so that worlds can be compared closely."""

from __future__ import annotations

import argparse
import atexit
import json
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.training.checkpointing import final_checkpoint


class Points:
    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(5, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return x, x.sin().sum()


class Net(torch.nn.Module):
    """A model with a part that only some micro-batches use, one that is never used, and unused statistics."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(5, width)
        self.outer = torch.nn.Linear(width, 1)
        self.sometimes = torch.nn.Parameter(torch.zeros(()))
        self.statistics = torch.nn.BatchNorm1d(5, affine=False)
        self.never = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1:
            self.statistics(x)
        y = self.outer(self.inner(x).tanh()).squeeze(-1)
        chosen = x[:, 0] > 1
        return y + self.sometimes * chosen if bool(chosen.any()) else y


class Fragile:
    """An object that ends each process that loads its state."""

    def state_dict(self) -> dict[str, int]:
        return {"taken": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Reader:
    """A loader that reads files of its own rank."""

    def __init__(self, job: Any) -> None:
        self._job = job

    def state_dict(self) -> dict[str, int]:
        return {"offset": self._job.committed_step * (1 + self._job.rank)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def hold(job: Any, steps: Collection[int]) -> None:
    """Wait at each of these steps until the test releases it, so that a slow test does not miss them."""
    word = Path(os.environ["HOLDFAST_AGENT_SOCKET"]).with_name(f"go-{job.committed_step}")
    while job.committed_step in steps and not word.exists():
        time.sleep(0.01)


def ends_late() -> None:
    """An interpreter that exits slowly, after the exit of Holdfast, and reports the time of that."""
    time.sleep(1.5)
    os.write(1, f'{{"ended": {time.monotonic()}}}\n'.encode())  # at once: ranks share their output


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--global-batch", type=int, default=7)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--hold-at", type=int, nargs="*", default=())
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--all-raise", action="store_true")
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--die-loading", action="store_true")
    parser.add_argument("--own-reader", action="store_true")
    parser.add_argument("--leave-at", type=int, default=-1)
    parser.add_argument("--exit-at", type=int, default=-1)
    parser.add_argument("--wider-in-slot", default="")
    args = parser.parse_args()
    if args.all_raise:
        final_checkpoint.LOOK_SECONDS = 60.0  # the time between the exceptions of two processes depends on the host
    if args.exit_at >= 0:
        atexit.register(ends_late)

    job = holdfast.init()
    torch.manual_seed(job.rank)  # ranks start with different weights: those of rank 0 must be used
    model = Net(17 if os.environ["HOLDFAST_SLOT"] == args.wider_in_slot else 16).to(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    more: dict[str, Any] = {"fragile": Fragile()} if args.die_loading else {}
    if args.own_reader:
        more["reader"] = Reader(job)
    job.manage(model=model, optimizer=optimizer, max_grad_norm=5.0, **more)
    losses = []
    for x, y in job.batches(Points(), global_batch_size=args.global_batch, micro_batch_size=2, max_steps=args.steps):
        if job.committed_step == args.raise_at and (args.all_raise or job.rank == job.world_size - 1):
            raise ValueError("loss is negative")
        if job.rank == job.world_size - 1:
            if job.committed_step == args.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if job.committed_step == args.exit_at:
                sys.exit(2)
            if job.committed_step == args.leave_at:
                return
        time.sleep(args.pause)
        hold(job, args.hold_at)
        result = job.step((model(x) - y).square().mean())
        if result.committed:
            losses.append(result.loss)
    told = {
        "losses": losses,
        "weights": [parameter.tolist() for parameter in model.parameters()],
        "statistics": model.statistics.running_mean.tolist(),
        "audit": str(job.audit()),
    }
    os.write(1, f"{json.dumps(told)}\n".encode())  # at once: ranks share their output


if __name__ == "__main__":
    main()
