"""Trains a line through points, slowly enough to be hurt. With `ASLEEP` set, rank 1 falls asleep once."""

import os
import pathlib
import time

import torch

import holdfast

torch.set_num_threads(1)
torch.manual_seed(0)
job = holdfast.init()
model = torch.nn.Linear(1, 1)
job.manage(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
slept = pathlib.Path(os.environ["TEST_DIR"]) / "slept"
points = [torch.tensor([x / 16.0, 3 * x / 16.0 + 1]) for x in range(64)]
for batch in job.batches(points, global_batch_size=12, micro_batch_size=4, max_steps=100_000, seed=0):
    if os.environ.get("ASLEEP") and job.rank == 1 and job.committed_step == 60 and not slept.exists():
        slept.touch()
        time.sleep(3600)
    result = job.step(((model(batch[:, :1]) - batch[:, 1:]) ** 2).mean())
    time.sleep(0.01)
