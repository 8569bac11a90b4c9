"""A script in which the weights of some ranks change silently, and which compares the replicas, or its guards do."""

from __future__ import annotations

import argparse
import itertools
import json
import os

import torch

import holdfast


def flip(job: holdfast.Job, model: torch.nn.Module, args: argparse.Namespace) -> None:
    if job.rank in args.flip:
        weight = model.weight.data.view(torch.int32)
        weight[0, 0] ^= 1 << (job.rank if args.different else 3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flip", type=int, nargs="*", default=())
    parser.add_argument("--different", action="store_true")
    parser.add_argument("--source", type=int)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--every", type=int, help="the period of the guards")
    parser.add_argument("--apart", action="store_true", help="each rank starts with other weights")
    args = parser.parse_args()
    job = holdfast.init(guards=holdfast.Guards(replica_check_steps=args.every or 0))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.manage(model=model, optimizer=optimizer)
    if args.apart:
        torch.nn.init.constant_(model.weight, float(job.rank))
    updates = itertools.count(1)
    if args.every:
        optimizer.register_step_pre_hook(lambda *_: flip(job, model, args) if next(updates) == 4 else None)
    said: list[str] = []
    losses: list[float] = []
    for batch in job.batches(torch.randn(24, 4), global_batch_size=6, micro_batch_size=2, max_steps=8):
        result = job.step(model(batch).square().mean())
        losses += [result.loss] if result.committed else []
        if args.every or not result.committed or result.step != 4:
            continue
        flip(job, model, args)
        if args.source is not None:
            job.synchronize(source=args.source)
        report = job.verify_replicas()
        said += [str(report), str(job.verify_replicas())]
    told = {"losses": losses, "said": said, "weights": model.weight.tolist()}
    os.write(1, f"{json.dumps(told)}\n".encode())  # at once: ranks share their output


if __name__ == "__main__":
    main()
