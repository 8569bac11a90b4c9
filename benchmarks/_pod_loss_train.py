"""Trains a tiny model, and records the time of each completed step: lines `step time` in its own file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

import holdfast

torch.set_num_threads(1)
torch.manual_seed(0)
job = holdfast.init()
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
job.manage(model=model, optimizer=optimizer)
rows = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
steps = Path(__file__).with_name(f"steps-{os.environ['HOLDFAST_POD_NAME']}.{os.getpid()}").open("a", buffering=1)
for batch in job.batches(rows, global_batch_size=24, micro_batch_size=8, max_steps=10_000_000):
    result = job.step((model(batch) - batch).square().mean())
    if result.committed:
        steps.write(f"{result.step} {time.time()}\n")
    time.sleep(0.05)
