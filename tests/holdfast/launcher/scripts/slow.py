"""Train forever. A slow rank is named after two seconds, and rank 1 is slow until the file `recovers` exists."""

import os
import pathlib
import time

import torch

import holdfast
from holdfast.training.protocol import slow_ranks

slow_ranks.PERSISTS_SECONDS, slow_ranks.LOOK_SECONDS = 2.0, 0.2
recovers = pathlib.Path(os.environ["TEST_DIR"]) / "recovers"
torch.set_num_threads(1)
job = holdfast.init()
model = torch.nn.Linear(4, 1)
job.manage(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
rows = torch.ones(96, 4)
for batch in job.batches(rows, global_batch_size=24, micro_batch_size=8, max_steps=1_000_000):
    time.sleep(0.2 if job.rank == 1 and not recovers.exists() else 0.02)
    job.step(model(batch).square().mean())
