"""The script of the growth benchmark; it pauses while a file in the folder requests it."""

import os
import time
from pathlib import Path

import torch
from _recovery.workload import Trace
from _steady.workload import SHAPES, Samples, build, loss_of

import holdfast


def main() -> None:
    torch.set_num_threads(1)
    shape, folder = SHAPES[os.environ["BENCH_SIZE"]], Path(os.environ["BENCH_FOLDER"])
    job = holdfast.init()
    model, optimizer = build(shape)
    job.manage(model=model, optimizer=optimizer)
    trace = Trace(job.rank)
    size = int(os.environ["BENCH_SAMPLES"]) * int(os.environ["BENCH_FULL"])
    for tokens in job.batches(
        Samples(shape), global_batch_size=size, micro_batch_size=size, max_steps=int(os.environ["BENCH_STEPS"])
    ):
        rest(job, folder)
        trace.rank = job.rank
        trace.begin()
        result = job.step(loss_of(model, tokens))
        if result.committed:
            trace.made(result.step, f"{job.generation}.{job.attempt}.{job.world_size}")


def rest(job: holdfast.Job, folder: Path) -> None:
    """Leave the cores to other processes, without being detected as hung."""
    asked = folder / "rest"
    if asked.exists():
        (folder / "resting").touch()
        with job.phase("evaluation"):
            while asked.exists():
                time.sleep(0.01)


if __name__ == "__main__":
    main()
