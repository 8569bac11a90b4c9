"""Trains a tiny model, records all its actions, and fails on request.

Each process writes lines of JSON to its own file: each micro-batch, each completed step, and the weights in each new
world. `holdfast_testbed.drill.script_log` reads them. A file `command.json` (`do`, `pod`, `at`; `code` for an exit)
makes the rank of that pod fail once, when step `at` is due. With `nan loss`, its loss is NaN for `steps` steps. While
a file `hold-saves` exists, no save ends. While a file `slow-POD` exists, the rank of that pod is slow.
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
# A roll-back excludes one epoch, so that later epochs still begin at multiples of their steps.
# Replicas are compared once in an epoch, which is about a second.
GUARDS = holdfast.Guards(
    roll_back_after=ROWS // BATCH,
    max_roll_backs=10_000,
    max_skipped_steps=1_000_000,
    replica_check_steps=ROWS // BATCH,
)
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


class Rows:
    """Samples whose first number is their index. On request, the next one cannot be read in the present step."""

    def __init__(self, notes: Notes, job: holdfast.Job) -> None:
        self._notes, self._job = notes, job
        self._rows = torch.randn(ROWS, 65, generator=torch.Generator().manual_seed(0))
        self._rows[:, 0] = torch.arange(ROWS)
        self.is_due = False
        self._spoilt = (-1, 0)
        """The sample, and the step in which it cannot be read. A later trial must not wait for its retries."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        step, attempt_id = self._job.committed_step + 1, (self._job.generation, self._job.attempt)
        if self.is_due:
            self.is_due, self._spoilt = False, (index, step)
            self._notes.write("struck", step, attempt_id)
            self._notes.write("skip", step, attempt_id, samples=[index])
        if self._spoilt == (index, step):
            raise OSError(f"sample {index} cannot be read, as requested")
        return self._rows[index]


def run_out_of_memory(hook: torch.utils.hooks.RemovableHandle) -> None:
    """Fail as a full GPU does, once."""
    hook.remove()
    raise torch.OutOfMemoryError("asked to run out of memory")


class Flip:
    """On request, flips a bit of a weight in the step of the optimizer before the next comparison of the replicas."""

    def __init__(self, notes: Notes, job: holdfast.Job, optimizer: torch.optim.Optimizer) -> None:
        self._notes, self._job, self.is_due = notes, job, False
        optimizer.register_step_post_hook(self._flip)

    def _flip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.is_due and self._job.committed_step % GUARDS.replica_check_steps == 0:
            self.is_due = False
            optimizer.param_groups[0]["params"][0].data[0, 0].neg_()  # the sign bit
            self._notes.write("struck", self._job.committed_step, (self._job.generation, self._job.attempt))


def fail_if_told(notes: Notes, job: holdfast.Job, rows: Rows, flip: Flip, weight: torch.nn.Parameter) -> int:
    """Fail as requested. Return for how many steps the loss is NaN."""
    command = FOLDER / "command.json"
    try:
        told = json.loads(command.read_text())
        if told["pod"] != POD or job.committed_step + 1 < told["at"]:
            return 0
        command.rename(command.with_suffix(".fired"))
    except (FileNotFoundError, ValueError):
        return 0
    later = {"bad sample": rows, "flip weight": flip}.get(told["do"])
    if later is not None:
        later.is_due = True
        return 0
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
        case "nan loss":
            return int(told.get("steps", 1))
        case "nan gradient":
            hook = weight.register_hook(lambda gradient: gradient * torch.nan)
            weight.register_post_accumulate_grad_hook(lambda _: hook.remove())
        case "gpu oom":
            hook = weight.register_hook(lambda _: run_out_of_memory(hook))
        case "nan weight":
            weight.data.fill_(torch.nan)
    return 0


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = holdfast.init(guards=GUARDS)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    notes, known, spoils = Notes(job, model), (0, 0), 0
    gate = Gate(notes, job)
    job.manage(model=model, optimizer=optimizer, gate=gate)
    rows, flip = Rows(notes, job), Flip(notes, job, optimizer)
    for batch in job.batches(rows, global_batch_size=BATCH, micro_batch_size=8, max_steps=10_000_000):
        attempt_id = (job.generation, job.attempt)
        if attempt_id != known:
            known = attempt_id
            notes.write("begin", job.committed_step, attempt_id, weights=notes.weights())
        spoils = max(0, spoils - 1) + fail_if_told(notes, job, rows, flip, next(model.parameters()))
        if (FOLDER / f"slow-{POD}").exists():
            time.sleep(4 * PACE)
        notes.write("take", job.committed_step + 1, attempt_id, samples=batch[:, 0].int().tolist())
        loss = (model(batch[:, 1:]) - batch[:, 1:].mean()).square().mean()
        result = job.step(loss * torch.nan if spoils else loss)
        if result.loss is not None and result.committed:  # without a loss, other ranks trained the step
            gate.trains = True
            notes.write("commit", result.step, attempt_id, weights=notes.weights())
            time.sleep(PACE)


main()
