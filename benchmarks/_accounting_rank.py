"""A script that trains, is killed once, and dawdles for `DELAY` seconds at each cause that `SLOW` names."""

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
    """Once in a run, over all its processes."""
    if cause in SLOW and _first(f"dawdled-{cause}"):
        time.sleep(DELAY)


def _first(name: str) -> bool:
    try:
        (FOLDER / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Data:
    """Samples of which one takes its time."""

    fingerprint = "accounting"

    def __init__(self) -> None:
        self.step = 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        if self.step == DAWDLES_AT:
            dawdle("data")
        return torch.full((4,), float(index))


class Slow:
    """A state that takes its time to be saved."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        if self.step >= DAWDLES_AT:
            dawdle("checkpoint")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """There is none."""


def main() -> int:
    """Train."""
    job = holdfast.init()
    data, slow, again = Data(), Slow(), not _first("began")
    model = torch.nn.Linear(4, 1)
    if again:
        job.on_membership(lambda _job: dawdle("restart"))
    job.manage(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-6), slow=slow)
    for batch in job.batches(data, global_batch_size=4, micro_batch_size=4, max_steps=STEPS):
        data.step = slow.step = job.committed_step
        time.sleep(0.02)
        if job.committed_step == DAWDLES_AT:
            dawdle("productive")
            with job.phase("evaluation"):
                dawdle("evaluation")
        if job.committed_step == DIES_AT and job.rank == job.world_size - 1 and _first("died"):
            dawdle("recompute")
            (FOLDER / "died").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGSTOP if "detection" in SLOW else signal.SIGKILL)
        job.step(model(batch).square().mean())
    return 0


if __name__ == "__main__":
    dawdle("startup")
    import torch

    import holdfast

    sys.exit(main())
