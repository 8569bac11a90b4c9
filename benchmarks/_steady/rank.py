"""One of two ranks, which hosts all contestants in turns.

`steady.py` starts it. Rank 0 writes one JSON line per block: the contestant, and its seconds per step and those of
DDP.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import holdfast
from _steady.workload import SHAPES, Samples, Shape, batch, build, loss_of
from holdfast.training.distributed.cancel_token import CancelToken
from holdfast.training.distributed.process_group import Group
from holdfast.training.loop import TrainingLoop
from holdfast.training.step.gradient_reducer import Reducer

RANKS = 2


class Contestant(ABC):
    """A contestant with its own model, optimizer and groups."""

    def __init__(self, shape: Shape, rank: int) -> None:
        self.shape = shape
        self.rank = rank
        self.steps = 0
        self.model, self.optimizer = build(shape)

    def turn(self, steps: int) -> float:
        """Return the wall-clock seconds of this many steps."""
        started = time.perf_counter()
        for _ in range(steps):
            self.step(self.batch())
            self.steps += 1
        return time.perf_counter() - started

    def batch(self) -> torch.Tensor:
        """Return this rank's samples of the next step."""
        return batch(self.shape, self.steps, self.rank)

    @abstractmethod
    def step(self, tokens: torch.Tensor) -> None:
        """Make one step."""


class Ddp(Contestant):
    """torch's DDP with its best settings."""

    def __init__(self, shape: Shape, rank: int) -> None:
        super().__init__(shape, rank)
        self._wrapped = DistributedDataParallel(self.model, gradient_as_bucket_view=True)

    def step(self, tokens: torch.Tensor) -> None:
        loss_of(self._wrapped, tokens).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()


class Averaging(Contestant):
    """Holdfast's averages, ballot and vote."""

    def __init__(self, shape: Shape, rank: int, port: int) -> None:
        super().__init__(shape, rank)
        self._group = Group.connect(
            host="127.0.0.1",
            port=port,
            prefix="ours",
            rank=rank,
            size=RANKS,
            device=torch.device("cpu"),
            cancel=CancelToken(),
            timeout=60,
        )
        self._reducer = Reducer(self.model.parameters(), optimizer=self.optimizer)
        self._reducer.attach(self._group)
        self._vote = torch.ones(1)

    def step(self, tokens: torch.Tensor) -> None:
        self._reducer.arm(last=True)
        (loss_of(self.model, tokens) * (1 / RANKS)).backward()  # type: ignore[no-untyped-call]
        touched = [float(flag) for flag in self._reducer.touched()]
        agreed = self._reducer.finish([*touched, 1.0, 0.5, 0.25])
        self._reducer.adopt([flag > 0 for flag in agreed[: len(touched)]])
        self._group.sum_(self._vote.fill_(1.0))
        self.optimizer.step()
        self._reducer.clear()


class Loop(Contestant):
    """All of Holdfast's loop: data, averages, vote, guard and optimizer, without launcher and checkpoints."""

    def __init__(self, shape: Shape, rank: int, **settings: Any) -> None:
        super().__init__(shape, rank)
        self._job = holdfast.init(**settings)
        self._job.manage(model=self.model, optimizer=self.optimizer)
        self._batches = self._job.batches(
            Samples(shape),
            global_batch_size=RANKS * shape.samples,
            micro_batch_size=shape.samples,
            max_steps=1 << 30,
            collate=torch.stack,
        )

    @property
    def loop(self) -> TrainingLoop:
        """The loop of the library."""
        return self._job._managed

    def batch(self) -> torch.Tensor:
        tokens: torch.Tensor = next(self._batches)
        return tokens

    def step(self, tokens: torch.Tensor) -> None:
        self._job.step(loss_of(self.model, tokens))


class Torchft(Contestant):
    """torchft with a replica group per rank and a lighthouse on rank 0."""

    def __init__(self, shape: Shape, rank: int) -> None:
        import torchft

        super().__init__(shape, rank)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
            min_replica_size=RANKS,
            load_state_dict=lambda _state: None,
            state_dict=dict,
            replica_id=f"replica-{rank}",
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self._store.port,
            hostname="127.0.0.1",
        )
        self._wrapped = torchft.DistributedDataParallel(self._manager, self.model)
        self._outer = torchft.Optimizer(self._manager, self.optimizer)

    def step(self, tokens: torch.Tensor) -> None:
        self._outer.zero_grad()
        loss_of(self._wrapped, tokens).backward()  # type: ignore[no-untyped-call]
        self._outer.step()


def main() -> None:
    """Run blocks of four turns: DDP first and last, or second and third, so that a drift of the machine cancels."""
    order = arguments()
    join(order)
    shape = SHAPES[order.shape]
    made: dict[str, Callable[[], Contestant]] = {
        "ddp": lambda: Ddp(shape, order.rank),
        "averaging": lambda: Averaging(shape, order.rank, order.port),
        "loop": lambda: Loop(shape, order.rank),
        "torchft": lambda: Torchft(shape, order.rank),
    }
    contestants = {name: made[name]() for name in ("ddp", *order.against)}
    for one in contestants.values():
        one.turn(order.warm)
    rng = random.Random(5)  # noqa: S311 - an order, the same on both ranks
    for _ in range(order.blocks):
        for name in rng.sample(order.against, len(order.against)):
            say(order.rank, **block(contestants["ddp"], contestants[name], name, order.steps, rng.random() < 0.5))
    dist.barrier()
    os._exit(0)


def join(order: argparse.Namespace) -> None:
    """Form the process group of both ranks."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", order.port, is_master=False, timeout=timedelta(minutes=5))
    dist.init_process_group("gloo", store=dist.PrefixStore("peer", store), rank=order.rank, world_size=RANKS)


def block(ddp: Contestant, other: Contestant, name: str, steps: int, outside: bool) -> dict[str, Any]:
    """Run one block. Return the wall-clock and CPU seconds per step, of the contestant and of DDP."""
    turns = (ddp, other, other, ddp) if outside else (other, ddp, ddp, other)
    wall, cpu = {id(ddp): 0.0, id(other): 0.0}, {id(ddp): 0.0, id(other): 0.0}
    for one in turns:
        dist.barrier()
        before = time.process_time()
        wall[id(one)] += one.turn(steps) / (2 * steps)
        cpu[id(one)] += (time.process_time() - before) / (2 * steps)
    return {
        "name": name,
        "wall": [wall[id(other)], wall[id(ddp)]],
        "cpu": [cpu[id(other)], cpu[id(ddp)]],
    }


def say(rank: int, **what: Any) -> None:
    if rank == 0:
        print(json.dumps(what), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--folder", help="for checkpoints")
    parser.add_argument("against", nargs="*")
    return parser.parse_args()


if __name__ == "__main__":
    main()
