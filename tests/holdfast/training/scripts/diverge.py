"""A script in which the weights of some ranks change silently, and which compares the replicas."""

from __future__ import annotations

import argparse
import json
import os

import torch

import holdfast


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flip", type=int, nargs="*", default=())
    parser.add_argument("--different", action="store_true")
    parser.add_argument("--source", type=int)
    parser.add_argument("--kill", type=int)
    args = parser.parse_args()
    job = holdfast.init()
    model = torch.nn.Linear(4, 2)
    job.manage(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))
    said: list[str] = []
    for batch in job.batches(torch.randn(24, 4), global_batch_size=6, micro_batch_size=2, max_steps=8):
        result = job.step(model(batch).square().mean())
        if not result.committed or result.step != 4:
            continue
        if job.rank in args.flip:
            weight = model.weight.data.view(torch.int32)
            weight[0, 0] ^= 1 << (job.rank if args.different else 3)
        if args.source is not None:
            job.synchronize(source=args.source)
        report = job.verify_replicas()
        said += [str(report), str(job.verify_replicas())]
    told = {"losses": [], "said": said, "weights": model.weight.tolist()}
    os.write(1, f"{json.dumps(told)}\n".encode())  # at once: ranks share their output


if __name__ == "__main__":
    main()
