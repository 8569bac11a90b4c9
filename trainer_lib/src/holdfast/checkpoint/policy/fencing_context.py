"""By which claims and job a store's checkpoints count. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.checkpoint.policy import fencing
from holdfast.core.attempt import Claim


@dataclass(frozen=True, kw_only=True)
class FencingContext:
    """By which commits are told from those that do not count."""

    claims: tuple[Claim, ...]
    job_uid: str
    resume: fencing.Resume

    @property
    def jobs(self) -> frozenset[str]:
        """Who has claimed where all can see it. What others left in this memory is no commit of this line."""
        return frozenset({self.job_uid, *(claim.job_uid for claim in self.claims)})
