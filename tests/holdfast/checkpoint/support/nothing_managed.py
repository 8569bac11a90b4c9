"""Commits of jobs that manage nothing, where only their names and claims matter."""

from __future__ import annotations

from holdfast.checkpoint.format.file_names import CommitName
from holdfast.checkpoint.save.protocol import Snapshot
from holdfast.core.attempt import Pair


def snapshot(step: int, pair: Pair) -> Snapshot:
    return Snapshot(
        name=CommitName(step=step, pair=pair),
        specs=[],
        read=lambda piece: b"",
        state={"objects": {}, "counters": {}},
        data=None,
        alone={},
        numerics={},
    )
