"""A script with its own loop, in which rank 0 makes fewer steps than the others, or saves alone."""

from __future__ import annotations

import sys

import torch

import holdfast

job = holdfast.init()
model = torch.nn.Linear(2, 1)
job.manage(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
apart = job.rank == 0
steps = 3 if apart and sys.argv[1] == "ends" else 5
while job.committed_step < steps:
    job.step(model(torch.ones(3, 2)).square().mean())
    if apart and sys.argv[1] == "saves" and job.committed_step == 3:
        job.save()
