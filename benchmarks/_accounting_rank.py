"""A script that trains, is killed once, and waits for `DELAY` seconds in each category that `SLOW` names."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

SLOW, DELAY = os.environ.get("SLOW", "").split(","), float(os.environ.get("DELAY", "0"))
FOLDER = Path(os.environ["HOLDFAST_RUN_DIR"])
STEPS, DAWDLES_AT, DIES_AT = 30, 12, 20


def dawdle(cause: str) -> None:
    """Wait in this category, once per run over all its processes."""
    if cause in SLOW and _first(f"dawdled-{cause}"):
        time.sleep(DELAY)


def _first(name: str) -> bool:
    try:
        (FOLDER / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def note(name: str, moment: float) -> None:
    """Record a time, so that the accounts can be compared with the script's own clock."""
    (FOLDER / name).write_text(str(moment))


class Data:
    """Samples, one of which is slow."""

    fingerprint = "accounting"

    def __init__(self, mark: str) -> None:
        self.step = 0
        self._mark = mark

    def mark(self) -> None:
        """Record when the first sample was requested: this process is ready."""
        if self._mark and _first(self._mark):
            note(self._mark, time.time())
        self._mark = ""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        self.mark()
        if self.step == DAWDLES_AT:
            dawdle("data")
        return torch.full((4,), float(index))


class Slow:
    """A state that is slow to save."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        if self.step >= DAWDLES_AT:
            dawdle("checkpoint")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load nothing."""


def main() -> int:
    job = holdfast.init()
    again = not _first("began")
    data, slow = Data("again" if again else "in-place"), Slow()
    model = torch.nn.Linear(4, 1)
    if again:
        job.on_membership(lambda _job: dawdle("restart"))
    job.manage(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-6), slow=slow)
    for batch in job.batches(data, global_batch_size=4, micro_batch_size=4, max_steps=STEPS):
        data.step, slow.step, began = job.committed_step, job.committed_step, time.time()
        time.sleep(0.02)
        if job.committed_step == DAWDLES_AT:
            dawdle("productive")
            with job.phase("evaluation"):
                dawdle("evaluation")
        loss = model(batch).square().mean()
        if job.committed_step == DIES_AT and job.rank == job.world_size - 1 and _first("died"):
            dawdle("recompute")
            note("step-began", began)
            note("died", time.time())
            os.kill(os.getpid(), signal.SIGSTOP if "detection" in SLOW else signal.SIGKILL)
        elif job.committed_step == DIES_AT and _first("waits"):
            note("waits", time.time())
        job.step(loss)
    return 0


if __name__ == "__main__":
    dawdle("startup")
    import torch

    import holdfast

    sys.exit(main())
