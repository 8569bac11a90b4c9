"""Trains a tiny model, saves often, and records the content of each checkpoint before a byte of it is written.

All ranks append lines of JSON to one file: `saved` when the state of a checkpoint is taken, `begin` with the state in
each new world, `made` after each step. With `DRILL_NOISE` the weights depend on each generator of each rank, and with
`DRILL_FROZEN` half of them do not change.
"""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

import numpy as np
import torch
import xxhash

import holdfast

WIDTH = int(os.environ.get("DRILL_WIDTH", "64"))
STEPS = int(os.environ.get("DRILL_STEPS", "100000000"))
PACE = float(os.environ.get("DRILL_PACE", "0.005"))
NOISE = "DRILL_NOISE" in os.environ
FROZEN = "DRILL_FROZEN" in os.environ
ROWS, BATCH, MICRO, INPUTS = 480, 24, 8, 64


class Notes:
    """Writes the records of this rank's state, as the script has it."""

    def __init__(self, job: holdfast.Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._job, self._model, self._optimizer = job, model, optimizer
        self._file = os.open(os.environ["DRILL_NOTES"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)

    def write(self, do: str, samples: list[int] | None = None) -> str:
        job, digest = self._job, self.digest()
        line = {
            "at": time.monotonic(),
            "do": do,
            "rank": job.rank,
            "pid": os.getpid(),
            "pair": [job.generation, job.attempt],
            "step": job.committed_step,
            "digest": digest,
            "generators": generators(),
            "durable": job.durable_step,
            "samples": samples or [],
        }
        os.write(self._file, json.dumps(line).encode() + b"\n")
        return digest

    def digest(self) -> str:
        """Return the digest of weights and moments with their names."""
        named = {f"model/{name}": tensor for name, tensor in self._model.state_dict().items()}
        for number, state in self._optimizer.state_dict()["state"].items():
            named |= {f"optimizer/state/{number}/{name}": tensor for name, tensor in state.items()}
        digest = xxhash.xxh3_128()
        for name in sorted(named):
            digest.update(name.encode())
            digest.update(named[name].detach().contiguous().numpy().reshape(-1).view(np.uint8))
        return digest.hexdigest()


class Noted:
    """Records the state when a checkpoint takes it, after the last step and before the first write."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def state_dict(self) -> dict[str, Any]:
        return {"digest": self._notes.write("saved")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load nothing: `begin` records the weights that were restored."""


def generators() -> str:
    """Return a digest of the generators of Python, numpy and torch."""
    digest = xxhash.xxh3_64(repr(random.getstate()).encode())
    _, keys, *rest = np.random.get_state(legacy=True)
    digest.update(np.asarray(keys).tobytes() + repr(rest).encode())
    digest.update(torch.get_rng_state().numpy().tobytes())
    return digest.hexdigest()


def shaken(x: torch.Tensor) -> torch.Tensor:
    """Draw from each generator. The draws affect the weights only with `DRILL_NOISE`."""
    noise = torch.rand(1) + random.random() + float(np.random.rand())  # noqa: S311
    return x * (1 + 0.01 * noise) if NOISE else x


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = holdfast.init()
    layers = [torch.nn.Linear(INPUTS, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, INPUTS)]
    model = torch.nn.Sequential(*layers, *([torch.nn.Dropout(0.1)] if NOISE else []))
    layers[2].requires_grad_(not FROZEN)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1 + job.rank)
    notes = Notes(job, model, optimizer)
    job.manage(model=model, optimizer=optimizer, noted=Noted(notes))
    rows = torch.randn(ROWS, 1 + INPUTS, generator=torch.Generator().manual_seed(0))
    rows[:, 0] = torch.arange(ROWS)
    known, taken = (0, 0), list[int]()
    for batch in job.batches(rows, global_batch_size=BATCH, micro_batch_size=MICRO, max_steps=STEPS):
        if (job.generation, job.attempt) != known:
            known, taken = (job.generation, job.attempt), []
            notes.write("begin")
        taken += batch[:, 0].int().tolist()
        result = job.step((model(shaken(batch[:, 1:])) - batch[:, 1:].mean()).square().mean())
        if result.committed:
            notes.write("made", taken)
            time.sleep(PACE)
        if result.reason != "Accumulating":
            taken = []


main()
