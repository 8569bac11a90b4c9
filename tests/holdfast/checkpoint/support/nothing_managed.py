"""Checkpoints of jobs without managed objects: of nothing, or of byte strings."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.core.attempt import AttemptId

Tensors = Mapping[str, bytes]


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


def snapshot_of(step: int, attempt_id: AttemptId, tensors: Tensors, *, rank: int = 0) -> Snapshot:
    return Snapshot(
        name=CheckpointName(step=step, attempt_id=attempt_id),
        specs=[TensorSpec(name=name, dtype="U8", shape=(len(data),)) for name, data in tensors.items()],
        read=lambda piece: tensors[piece.spec.name][piece.start[0] : piece.start[0] + piece.shape[0]],
        state={"objects": {}, "counters": {}},
        data=None,
        per_rank={"rank": rank},
        numerics={},
        job_uid="job-1",
        publication="p1",
    )
