"""A small training whose restart is exact, or not: `resumed.py KIND MAX_STEPS`."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional

import holdfast


def main() -> None:
    kind, max_steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    if kind != "unseeded":
        torch.manual_seed(0)
    job = holdfast.init(checkpoint_dir=sys.argv[3], checkpoint_interval=1000, resume="Never")
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if kind == "no-step":
        return
    job.manage(model=model, optimizer=optimizer, scheduler=scheduler)
    average = torch.zeros(8, 4)  # "left-out": it is in no checkpoint
    data = [torch.full((4,), float(number)) for number in range(400)]
    for batch in job.batches(data, global_batch_size=4, micro_batch_size=4, max_steps=max_steps, seed=0):
        if kind == "fails" and job.committed_step == 1:
            raise RuntimeError("the disk of the data is gone")
        loss = functional.mse_loss(model(batch), batch.mean(dim=1, keepdim=True))
        if kind == "left-out":
            average = 0.5 * average + 0.5 * model[0].weight.detach()
            loss = loss + 1000 * functional.mse_loss(model[0].weight, average)
        job.step(loss)


if __name__ == "__main__":
    main()
