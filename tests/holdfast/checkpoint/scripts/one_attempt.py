"""One attempt of a job without torch: restore, claim, save step 20, delete step 1. Runs under strace.

The stat of `begin` marks the end of the interpreter's start, which includes the import of numpy: a restore needs it,
and its files would be most of the calls.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np  # noqa: F401

from holdfast.checkpoint.attempt_info import Attempt
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.core.attempt import AttemptId

TENSORS = {"weight": bytes(range(256)) * 4, "bias": b"b" * 64}


def snapshot(step: int, attempt_id: AttemptId) -> Snapshot:
    return Snapshot(
        name=CheckpointName(step=step, attempt_id=attempt_id),
        specs=[TensorSpec(name=name, dtype="U8", shape=(len(data),)) for name, data in TENSORS.items()],
        read=lambda piece: TENSORS[piece.spec.name],
        state={"objects": {"step": step}, "counters": {}},
        data=None,
        per_rank={"rank": 0},
        numerics={},
    )


def run(
    root: Path, attempt_id: AttemptId, steps: list[int], announce: Callable[[int], object] = lambda step: None
) -> int:
    """Return the step from which the attempt resumed, then save `steps`."""
    attempt = Attempt(attempt_id=attempt_id, job_uid="job-1", publication="p1", run_id="run")
    engine = CheckpointManager(root, keep_last=2, resume=Resume.ALWAYS, on_foreign=print)
    engine.enter(attempt, SingleRank())
    found = engine.restore()
    engine.claim(step=found.step, attempt_id=found.attempt_id)
    for step in steps:
        result = engine.save(snapshot(step, attempt_id))
        if not result.committed:
            raise SystemExit(result.message)
        announce(step)
    return found.step


if __name__ == "__main__":
    folder, attempt_number, *wanted = sys.argv[1:]
    Path(folder, "begin").exists()
    run(
        Path(folder),
        AttemptId(1, int(attempt_number)),
        [int(step) for step in wanted],
        lambda step: os.write(1, f"committed {step}\n".encode()),
    )
    Path(folder, "end").exists()
