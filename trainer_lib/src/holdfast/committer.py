"""When a commit is due, and what follows from one that failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from holdfast.checkpoint.engine import Engine
from holdfast.checkpoint.writer import SaveResult, Snapshot
from holdfast.config import Interval
from holdfast.constants import SHARED_TIER
from holdfast.errors import CheckpointError
from holdfast.lineage import Lineage
from holdfast.rank_agent import Agent, Requests

_log = logging.getLogger("holdfast.checkpoint")

FAILED_SAVES: Final = 3
INTERVAL_ID: Final = "interval"


class Committer:
    """Commits the job's steps and tells the launcher of each. Every rank makes the same calls."""

    def __init__(self, engine: Engine | None, agent: Agent, interval: Interval, lineage: Lineage) -> None:
        self._engine = engine
        self._agent = agent
        self._interval = interval
        self._lineage = lineage
        self._coordinator = False
        self._saved_at = time.monotonic()
        self._failed = 0
        self._broken_off = False

    @property
    def has_folder(self) -> bool:
        """Whether commits can be made at all."""
        return self._engine is not None

    def begin(self, *, coordinator: bool) -> None:
        """A world has lined up."""
        self._coordinator = coordinator

    def due_at(self, step: int) -> bool:
        """Whether every rank commits this step without being asked."""
        return self.has_folder and self._interval.due_at(step)

    def overdue(self) -> bool:
        """Whether this rank asks the others for a commit: it is time, says the coordinator, or a lost peer broke the
        last one off."""
        waited = time.monotonic() - self._saved_at
        over = self._coordinator and self._interval.due_after(waited)
        return self.has_folder and (over or self._broken_off)

    def behind(self, step: int) -> bool:
        """Whether the last step is not durable yet."""
        return self.has_folder and self._lineage.saved_step != step

    def commit(self, step: int, snapshot: Callable[[], Snapshot]) -> SaveResult:
        """Commit and tell; CheckpointError after too many failures in a row."""
        wanted, started = self._agent.requests(), time.monotonic()
        by_interval = self.due_at(step) or self.overdue()
        self._broken_off = True  # until all have made it
        result = self._save(snapshot)
        self._broken_off = False
        ids = [*([INTERVAL_ID] if by_interval else []), *wanted.checkpoint, *wanted.quiesce]
        self._tell(step, result, ids, time.monotonic() - started)
        self._saved_at = time.monotonic()
        if result.committed or not self.has_folder:
            self._agent.answered(Requests(checkpoint=wanted.checkpoint))
        if result.committed:
            self._lineage.saved_step, self._failed = step, 0
        elif self.has_folder:
            self._count_failed(step, result.message)
        return result

    def put_off(self) -> None:
        """Ask for a commit with the next step, as after one that was broken off."""
        self._broken_off = True

    def answer_rest(self, step: int) -> None:
        """What was asked after the last commit is answered by it, since no step was made since."""
        wanted = self._agent.requests()
        if self.has_folder and wanted.checkpoint:
            self._tell(step, SaveResult(committed=True), wanted.checkpoint, 0.0)
            self._agent.answered(Requests(checkpoint=wanted.checkpoint))

    def _save(self, snapshot: Callable[[], Snapshot]) -> SaveResult:
        if self._engine is None:
            return SaveResult(committed=False, message="the job has no checkpoint folder")
        return self._engine.save(snapshot())

    def _tell(self, step: int, result: SaveResult, ids: Sequence[str], seconds: float) -> None:
        self._agent.send(
            "checkpoint",
            step=step,
            tier=SHARED_TIER,
            result="Committed" if result.committed else "Failed",
            seconds=round(seconds, 3),
            ids=list(ids),
            message=result.message,
        )

    def _count_failed(self, step: int, message: str) -> None:
        self._failed += 1
        _log.error(
            "step %d could not be committed (%d in a row): %s; training goes on from what was committed before",
            step,
            self._failed,
            message,
        )
        if self._failed >= FAILED_SAVES:
            raise CheckpointError(
                f"{FAILED_SAVES} checkpoints in a row could not be written ({message}): "
                "make room in the checkpoint folder or make it writable; training goes on from the last commit"
            )
