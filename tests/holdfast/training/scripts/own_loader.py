"""A script with its own loop that makes no call at its end."""

from __future__ import annotations

import sys

import torch

import holdfast

job = holdfast.init()
model = torch.nn.Linear(2, 1)
job.manage(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
while job.committed_step < int(sys.argv[1]):
    job.step(model(torch.ones(3, 2)).square().mean())
if len(sys.argv) > 2:
    raise ValueError(sys.argv[2])
