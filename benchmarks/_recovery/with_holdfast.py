"""Ours."""

import os

from workload import PER_RANK, Samples, Trace, loss_of, prepare

import holdfast


def world_of(job: holdfast.Job) -> str:
    return f"{job.generation}.{job.attempt}.{job.world_size}"


def main() -> None:
    job = holdfast.init()
    model, optimizer = prepare()
    full = int(os.environ["BENCH_FULL"])
    share = holdfast.Elasticity(batch="scaled", reference_world_size=full)  # as with torchft, which keeps no batch
    job.manage(model=model, optimizer=optimizer, elasticity=share)
    trace = Trace(job.rank)
    size = PER_RANK * full
    for tokens in job.batches(
        Samples(), global_batch_size=size, micro_batch_size=PER_RANK, max_steps=int(os.environ["BENCH_STEPS"])
    ):
        trace.rank = job.rank
        trace.begin(lambda: job.audit().ok)
        result = job.step(loss_of(model, tokens))
        if result.committed:
            trace.made(result.step, world_of(job))


if __name__ == "__main__":
    main()
