"""Trains a tiny model, records all its actions, and fails on request.

Each process writes lines of JSON to its own file: each micro-batch, each completed step, and the weights in each new
world. `holdfast_testbed.drill.script_log` reads them. A file `command.json` (`do`, `pod`, `at`; `code` for an exit)
makes the rank of that pod fail once, when step `at` is due. While a file `hold-saves` exists, no save ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import holdfast

ROWS, BATCH, PACE = 480, 24, 0.05
FOLDER = Path(__file__).parent
POD = os.environ["HOLDFAST_POD_NAME"]


class Notes:
    """Appends records. Those that do not fit on a full disk are written later."""

    def __init__(self, job: holdfast.Job, model: torch.nn.Module) -> None:
        self._job, self._model, self._left = job, model, b""
        path = FOLDER / f"notes-{POD}.{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)

    def write(self, do: str, step: int, attempt_id: tuple[int, int], **more: Any) -> None:
        line = {"at": time.time(), "do": do, "pod": POD, "attempt_id": attempt_id, "step": step, **more}
        self._left += json.dumps(line).encode() + b"\n"
        try:
            self._left = self._left[os.write(self._file, self._left) :]
        except OSError:
            return

    def weights(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for parameter in self._model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


class Gate:
    """A part of the state that delays the saves of a rank that trains."""

    def __init__(self, notes: Notes, job: holdfast.Job) -> None:
        self._notes, self._job, self.trains = notes, job, False

    def state_dict(self) -> dict[str, Any]:
        hold = FOLDER / "hold-saves"
        if self.trains and hold.exists():
            self._notes.write("save", self._job.committed_step, (self._job.generation, self._job.attempt))
            while hold.exists():
                time.sleep(PACE)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def fail_if_told(notes: Notes, job: holdfast.Job) -> None:
    command = FOLDER / "command.json"
    try:
        told = json.loads(command.read_text())
        if told["pod"] != POD or job.committed_step + 1 < told["at"]:
            return
        command.rename(command.with_suffix(".fired"))
    except (FileNotFoundError, ValueError):
        return
    notes.write("struck", job.committed_step, (job.generation, job.attempt))
    match told["do"]:
        case "raise":
            raise RuntimeError("asked to fail")
        case "exit":
            sys.exit(told.get("code", 2))
        case "hang":
            threading.Event().wait()
        case "fill memory":
            blocks = []
            # On a busy host this takes longer than a step may, and would end as a hang before the memory is full.
            with job.phase("evaluation"):
                while True:
                    blocks.append(b"\x01" * (32 << 20))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = holdfast.init()
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    notes, known = Notes(job, model), (0, 0)
    gate = Gate(notes, job)
    job.manage(model=model, optimizer=optimizer, gate=gate)
    rows = torch.randn(ROWS, 65, generator=torch.Generator().manual_seed(0))
    rows[:, 0] = torch.arange(ROWS)
    for batch in job.batches(rows, global_batch_size=BATCH, micro_batch_size=8, max_steps=10_000_000):
        attempt_id = (job.generation, job.attempt)
        if attempt_id != known:
            known = attempt_id
            notes.write("begin", job.committed_step, attempt_id, weights=notes.weights())
        fail_if_told(notes, job)
        notes.write("take", job.committed_step + 1, attempt_id, samples=batch[:, 0].int().tolist())
        result = job.step((model(batch[:, 1:]) - batch[:, 1:].mean()).square().mean())
        if result.loss is not None and result.committed:  # without a loss, other ranks trained the step
            gate.trains = True
            notes.write("commit", result.step, attempt_id, weights=notes.weights())
            time.sleep(PACE)


main()
