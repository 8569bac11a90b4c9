"""The demo's script: a small network predicts the next byte of the standard library's source.

`python -m holdfast.cli.demo.train FOLDER MAX_STEPS`; like any user's script, it contains no code for the faults.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import holdfast
from holdfast.cli.demo.launchers import PACE_FILE
from holdfast.fault_injection.step_trace import Recorder

CONTEXT = 32
WIDTH = 64
GLOBAL_BATCH = 48
MICRO_BATCH = 16


class Text:
    """Windows of a text; one sample is `CONTEXT` bytes and the byte after them."""

    def __init__(self) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        source = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py"))[:40])
        self._bytes = torch.frombuffer(bytearray(source), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._bytes) - CONTEXT

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._bytes[index : index + CONTEXT + 1]


def network() -> nn.Module:
    """Return a network with about 550,000 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(256, WIDTH), nn.Flatten(), nn.Linear(CONTEXT * WIDTH, 256), nn.GELU(), nn.Linear(256, 256)
    )


def pace(folder: Path) -> float:
    """Return the seconds to pause after a step, for the viewer; 0 without a file."""
    file = folder / PACE_FILE
    return float(file.read_text()) if file.exists() else 0.0


def main() -> None:
    """Train with the pause that the file in the folder sets."""
    folder, max_steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    job = holdfast.init()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.manage(model=model, optimizer=optimizer)
    recorder = Recorder(folder / "trace")
    for window in job.batches(
        Text(), global_batch_size=GLOBAL_BATCH, micro_batch_size=MICRO_BATCH, max_steps=max_steps, seed=0
    ):
        recorder.begin()
        logits = model(window[:, :-1].long())
        result = job.step(functional.cross_entropy(logits, window[:, -1].long()))
        if result.committed:
            recorder.made(result.step, rank=job.rank, size=job.world_size, loss=result.loss)
        time.sleep(pace(folder))
    if job.is_coordinator:
        audit = job.audit()
        document = {"ok": audit.ok, "samples": audit.seen.count, "step": job.committed_step}
        (folder / "audit.json").write_text(json.dumps(document))


if __name__ == "__main__":
    main()
