"""The script of Holdfast with a fixed computing time, which is three times as long on a slow rank."""

import os
import random
import time

import torch
from workload import Trace

import holdfast

PERIOD = 20  # steps with the same slow rank and frequency
OFTEN, SELDOM = 1.0, 0.1


def straggler(step: int, world: int) -> int:
    """Return the slow rank of this step, the same on every rank; -1 if there is none."""
    of_period, of_step = random.Random(step // PERIOD), random.Random(-1 - step)  # noqa: S311 - no secret
    chance = OFTEN if of_period.random() < 1 / 4 else SELDOM  # a whole period of one rank, or single steps
    rank = (of_period if chance == OFTEN else of_step).randrange(world)
    return rank if of_step.random() < chance else -1


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pace, times = float(os.environ["BENCH_PACE"]), float(os.environ["BENCH_TIMES"])
    job = holdfast.init()
    model = torch.nn.Linear(16, 16)
    job.manage(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    trace = Trace(job.rank)
    rows = torch.randn(512, 16)
    size = int(os.environ["BENCH_FULL"])
    for batch in job.batches(
        rows, global_batch_size=size, micro_batch_size=1, max_steps=int(os.environ["BENCH_STEPS"])
    ):
        trace.rank = job.rank
        trace.begin()
        slow = straggler(job.committed_step, job.world_size) == job.rank
        time.sleep(pace * (times if slow else 1.0))
        result = job.step((model(batch) - batch).square().mean())
        if result.committed:
            trace.made(result.step, f"{job.generation}.{job.attempt}.{job.world_size}")


if __name__ == "__main__":
    main()
