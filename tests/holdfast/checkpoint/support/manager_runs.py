"""Attempts of one job, each with its checkpoint manager."""

from __future__ import annotations

from pathlib import Path

from nothing_managed import snapshot

from holdfast.checkpoint.attempt_info import Attempt
from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.manager import NO_RULES, CheckpointManager
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.policy.retention import Rules
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.core.attempt import AttemptId, Claim

JOB = "job-1"


class Run:
    """An attempt that restored and claimed."""

    def __init__(
        self,
        root: Path,
        generation: int,
        attempt: int,
        *,
        known: tuple[Claim, ...] = (),
        job: str = JOB,
        keep_last: int = 3,
        resume: Resume = Resume.ALWAYS,
        rules: Rules = NO_RULES,
    ) -> None:
        self.attempt_id = AttemptId(generation, attempt)
        self.foreign: list[Claim] = []
        attempt = Attempt(
            attempt_id=self.attempt_id, job_uid=job, publication=f"p{generation}", run_id="run", known=known
        )
        self.engine = CheckpointManager(
            root, keep_last=keep_last, resume=resume, on_foreign=self.foreign.extend, rules=rules
        )
        self.engine.enter(attempt, SingleRank())
        self.found = self.engine.restore()
        self.claim = self.engine.claim(step=self.found.step, attempt_id=self.found.attempt_id)

    def commits(self, *steps: int) -> Run:
        for step in steps:
            assert self.engine.save(snapshot(step, self.attempt_id)).committed
        return self


def commits(root: Path) -> set[str]:
    return {str(name) for name in catalog.list_commits(root)}
