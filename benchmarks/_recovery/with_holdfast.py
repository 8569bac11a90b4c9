"""The script of Holdfast."""

import contextlib
import os
from typing import Any

import torch
from workload import PER_RANK, Samples, Trace, loss_of, prepare

import holdfast
from holdfast.core.errors import PeerLostError
from holdfast.training.distributed.process_group import Group
from holdfast.training.step.stepper import Stepper


def world_of(job: holdfast.Job) -> str:
    return f"{job.generation}.{job.attempt}.{job.world_size}"


groups: list[Group] = []
attach = Stepper.attach


def remember(stepper: Stepper, group: Group, *arguments: Any, **more: Any) -> None:
    groups.append(group)
    attach(stepper, group, *arguments, **more)


def mismatch(job: holdfast.Job) -> None:
    """Wait in a collective that no other rank enters, until the attempt ends."""
    with job.phase("vote"), contextlib.suppress(PeerLostError):
        groups[-1].receive_(torch.empty(1), frm=0, tag=77)


def main() -> None:
    Stepper.attach = remember
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
        trace.begin(lambda: job.audit().ok, lambda: mismatch(job))
        result = job.step(loss_of(model, tokens))
        if result.committed:
            trace.made(result.step, world_of(job))


if __name__ == "__main__":
    main()
