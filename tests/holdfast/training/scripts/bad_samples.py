"""A script that cannot read some samples of its dataset: those of its arguments."""

from __future__ import annotations

import json
import os
import sys

import torch

import holdfast


class Rows:
    def __init__(self, bad: list[int]) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            raise OSError(f"sample {index} is broken")
        return torch.tensor([index / 80.0], dtype=torch.float64)


def main() -> None:
    most, *bad = map(int, sys.argv[1:])
    job = holdfast.init(guards=holdfast.Guards(sample_retries=1, max_bad_samples=most))
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1).to(torch.float64)
    job.manage(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    results = []
    for batch in job.batches(Rows(bad), global_batch_size=8, micro_batch_size=2, max_steps=5):
        result = job.step(model(batch).square().mean())
        if result.reason != "Accumulating":
            results.append((result.step, result.loss))
    told = {"losses": results, "weights": [*model.weight.tolist(), model.bias.tolist()], "audit": str(job.audit())}
    os.write(1, f"{json.dumps(told)}\n".encode())  # at once: ranks share their output


if __name__ == "__main__":
    main()
