"""Checkpoints of jobs without managed objects, for tests that need only names and claims."""

from __future__ import annotations

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.core.attempt import AttemptId


def snapshot(step: int, attempt_id: AttemptId) -> Snapshot:
    return Snapshot(
        name=CheckpointName(step=step, attempt_id=attempt_id),
        specs=[],
        read=lambda piece: b"",
        state={"objects": {}, "counters": {}},
        data=None,
        per_rank={},
        numerics={},
    )
