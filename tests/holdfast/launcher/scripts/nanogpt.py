"""Trains like nanoGPT: rank 0 evaluates and saves its own checkpoint in the loop body, without `job.phase`.

A batch of another length comes late, and the compiled model is traced again. EVALUATES and SAVES are seconds.
"""

from __future__ import annotations

import io
import os
import time

import torch
from torch import nn

import holdfast

EVALUATES, SAVES = float(os.environ["EVALUATES"]), float(os.environ["SAVES"])
PIECE_SECONDS = 2.0


class SlowDisk(io.BytesIO):
    """Accepts a piece every two seconds. The writer sleeps in between."""

    def write_all(self, state: dict[str, torch.Tensor]) -> None:
        torch.save(state, self)
        for _ in range(round(SAVES / PIECE_SECONDS)):
            time.sleep(PIECE_SECONDS)


def evaluate(model: nn.Module, tokens: torch.Tensor, seconds: float) -> None:
    end = time.monotonic() + seconds
    with torch.no_grad():
        while time.monotonic() < end:
            model(tokens)
            time.sleep(0.01)  # waits for the next batch


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = holdfast.init()
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.manage(model=model, optimizer=optimizer)
    traced = []
    compiled = torch.compile(model, backend=lambda graph, _: traced.append(graph) or graph.forward, dynamic=False)
    data = [torch.randint(64, (32,)) for _ in range(256)]
    done = set()
    for tokens in job.batches(data, global_batch_size=8, micro_batch_size=4, max_steps=80, seed=0):
        step = job.committed_step
        if job.rank == 0 and step not in done:
            done.add(step)
            if step in (30, 60):
                print("evaluates at", step, flush=True)
                evaluate(model, tokens, EVALUATES)
            if step == 40:
                print("saves at", step, flush=True)
                SlowDisk().write_all(model.state_dict())
        time.sleep(0.02)
        length = 16 if step == 50 else 32
        job.step(compiled(tokens[:, :length]).pow(2).mean())
    print("done at", job.committed_step, "in attempt", job.attempt, "traced", len(traced), flush=True)


main()
