"""A script whose weights depend on each generator of each rank: dropout, and numbers of Python and numpy."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time

import numpy as np
import torch

import holdfast


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail-at", type=int, nargs=2, action="append", default=[], metavar=("SLOT", "STEP"))
    parser.add_argument("--hold-at", type=int, default=-1)
    args = parser.parse_args()
    slot, job = int(os.environ["HOLDFAST_SLOT"]), holdfast.init()
    random.seed(slot)
    np.random.seed(slot)
    torch.manual_seed(slot)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    job.manage(model=model, optimizer=optimizer)
    rows = torch.arange(48.0).reshape(12, 4) / 48
    losses: list[tuple[int, float | None]] = []
    drawn: dict[str, list[float]] = {}
    for x in job.batches(rows, global_batch_size=12, micro_batch_size=2, max_steps=12):
        while job.committed_step == args.hold_at:
            time.sleep(0.1)  # until the test ends this process
        noise = random.random() + float(np.random.rand()) + torch.rand(1)
        loss = (model(x) - noise).square().mean()
        drawn.setdefault(f"rank {job.rank} step {job.committed_step}", []).append(float(noise))
        if [slot, job.committed_step] in args.fail_at:
            os.kill(os.getpid(), signal.SIGKILL)
        result = job.step(loss)
        if result.committed:
            losses.append((result.step, result.loss))
            if job.rank == 0:
                torch.rand(3)  # an evaluation of one rank
    weights = [parameter.detach().numpy().tobytes().hex() for parameter in model.parameters()]
    os.write(1, f"{json.dumps({'losses': losses, 'weights': weights, 'drawn': drawn})}\n".encode())


if __name__ == "__main__":
    main()
