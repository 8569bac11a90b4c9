"""A script whose loss is not finite in some steps of its first pass, so that the job rolls back.

With `--spoil`, only a weight of rank 1 is not finite, in step 5, and the job has no checkpoint folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import holdfast

BAD = range(16, 24)
"""The places of samples in the order of use: those of the steps 5 and 6."""


def hold(job: holdfast.Job, step: int) -> None:
    """Wait before the next step until the test releases this one."""
    word = Path(os.environ["HOLDFAST_AGENT_SOCKET"]).with_name(f"go-{step}")
    while "--hold" in sys.argv and job.committed_step == step and not word.exists():
        time.sleep(0.01)


def main() -> None:
    from holdfast.training.data import sample_at

    bad = [sample_at(place, size=80, seed=0)[1] for place in BAD]
    data = torch.arange(80.0, dtype=torch.float64).unsqueeze(1) / 80
    spoils = "--spoil" in sys.argv
    if spoils:
        os.environ.pop("HOLDFAST_CHECKPOINT_DIR")
    else:
        data[bad] = torch.inf
    job = holdfast.init(guards=holdfast.Guards(lower_after=1, roll_back_after=2))
    torch.manual_seed(job.rank)
    model = torch.nn.Linear(1, 1).to(torch.float64)
    job.manage(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    reasons = []
    for batch in job.batches(data, global_batch_size=4, micro_batch_size=2, max_steps=9):
        hold(job, 4)
        if spoils and (job.rank, job.committed_step) == (1, 4):
            model.weight.data.fill_(torch.nan)
        result = job.step(model(batch).square().mean())
        reasons.append(f"{result.step} {result.reason}")
    told = {"losses": reasons, "weights": [*model.weight.tolist(), model.bias.tolist()], "audit": str(job.audit())}
    os.write(1, f"{json.dumps(told)}\n".encode())  # at once: ranks share their output


if __name__ == "__main__":
    main()
