"""A script in which the GPU of some ranks is full in step 5, so that backward raises torch's error.

Each argument is the number of times that the memory of one rank is full: `0 2` means rank 1, twice. If the variable
`FITS` is set, larger micro-batches also raise the error in all ranks and steps, before their forward pass.
"""

from __future__ import annotations

import json
import os
import sys

import torch

import holdfast


def main() -> None:
    job = holdfast.init()
    left = [int(sys.argv[1 + job.rank])]
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1).to(torch.float64)
    job.manage(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
    data = torch.arange(80.0, dtype=torch.float64).unsqueeze(1) / 80
    told: list[str] = []
    fits = int(os.environ.get("FITS", "80"))

    def full(gradient: torch.Tensor) -> torch.Tensor:
        if job.committed_step == 4 and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gradient

    for batch in job.batches(data, global_batch_size=10, micro_batch_size=3, max_steps=8):
        if len(batch) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        loss = model(batch).square().mean()
        loss.register_hook(full)
        result = job.step(loss)
        told.append(f"{result.step} {len(batch)} {result.reason}")
    weights = [*model.weight.tolist(), model.bias.tolist()]
    os.write(1, f"{json.dumps({'losses': told, 'weights': weights, 'audit': str(job.audit())})}\n".encode())


if __name__ == "__main__":
    main()
