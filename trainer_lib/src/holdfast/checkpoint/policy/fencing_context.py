"""The claims and the job that decide which checkpoints of a store count. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.checkpoint.policy import fencing
from holdfast.core.attempt import Claim


@dataclass(frozen=True, kw_only=True)
class FencingContext:
    """The claims and settings that decide which checkpoints count."""

    claims: tuple[Claim, ...]
    job_uid: str
    resume: fencing.Resume

    @property
    def jobs(self) -> frozenset[str]:
        """The jobs with a claim on a shared tier. Memory that other jobs left has no checkpoint of this line."""
        return frozenset({self.job_uid, *(claim.job_uid for claim in self.claims)})
