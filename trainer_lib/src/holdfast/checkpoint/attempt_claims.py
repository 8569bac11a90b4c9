"""The claims that decide which checkpoints an attempt reads, and the claim that the attempt writes. No torch.

Before its first step, an attempt restores a state and writes its claim. After that, no attempt reads a checkpoint
that an older attempt publishes beyond the claimed step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.checkpoint.attempt_info import Attempt
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.policy import fencing
from holdfast.checkpoint.policy.fencing_context import FencingContext
from holdfast.checkpoint.stores.base import CheckpointStore, SharedStore
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import ClaimError, ForeignClaimError


class Fence:
    """The claims of the shared store and of its copies that apply to the current attempt."""

    def __init__(
        self,
        shared: SharedStore,
        stores: Sequence[CheckpointStore],
        resume: fencing.Resume,
        on_foreign: Callable[[tuple[Claim, ...]], None],
    ) -> None:
        self.resume = resume
        self.claims: tuple[Claim, ...] = ()
        self.attempt = Attempt(attempt_id=AttemptId(0, 0), job_uid="", publication="", run_id="")
        self._shared = shared
        self._stores = stores
        self._on_foreign = on_foreign

    def enter(self, attempt: Attempt) -> None:
        """Make `attempt` the current attempt, in whose name claims are written."""
        self.attempt = attempt
        self.claims = fencing.union(self.claims, attempt.known)

    @property
    def context(self) -> FencingContext:
        """The claims and settings that decide which checkpoints count."""
        return FencingContext(claims=self.claims, job_uid=self.attempt.job_uid, resume=self.resume)

    def refresh(self) -> None:
        self._shared.prepare()
        self._apply(self._shared.claims())

    def refresh_all(self) -> list[dict[str, object]]:
        """Read the claims of the shared store and of its copies, and return them as JSON objects.

        The copies may be the only place that still has claims. Reading them is slow, so a fast recovery uses
        `refresh` instead.
        """
        self.refresh()
        self._apply(fencing.union(*(store.claims() for store in self._stores)))
        return [claim.to_json() for claim in self.claims]

    def _apply(self, on_tier: Sequence[Claim]) -> None:
        self._refuse_foreign(on_tier)
        self.claims = fencing.union(on_tier, self.attempt.known)

    @property
    def known_step(self) -> int:
        """The step that the highest claim of this job's line continues, or the newest step known to
        be on the volume.
        """
        bound = fencing.binding(self.claims, self.attempt.job_uid)
        top = bound[0] if bound else None
        of_other_job = top is not None and top.job_uid != self.attempt.job_uid
        continued = 0 if top is None or (of_other_job and self.resume is fencing.Resume.NEVER) else top.from_step
        return max(continued, self.attempt.durable)

    def write(self, claim: Claim, base: CheckpointName | None, *, again: bool) -> None:
        """Make a claim durable.

        `base` is the checkpoint that the claim continues, if it was read from the shared store.
        """
        self._require_base(claim, base)
        try:
            self._shared.write_claim(claim, again=again)
        except ClaimError:
            self._refuse_foreign(self._shared.claims())  # reports the other job, if another job took the name first
            raise
        try:
            self._require_base(claim, base)
        except ClaimError:
            self._shared.remove_claims([claim])
            raise
        on_tier = self._shared.claims()
        self._refuse_foreign([other for other in on_tier if other != claim])
        self.claims = fencing.union(on_tier, self.claims)
        self._shared.clean(claim.attempt_id)
        self._shared.remove_claims(fencing.superfluous(on_tier, claim))

    def _require_base(self, claim: Claim, base: CheckpointName | None) -> None:
        if base is None or (base.step, base.attempt_id) != (claim.from_step, claim.from_attempt_id):
            return
        if not self._shared.exists(base):
            raise ClaimError(
                f"{base} in {self._shared.url} was deleted after this attempt read it, because an attempt that "
                "this one replaces still saves there. Nothing else is lost. The next attempt resumes from "
                "its newest checkpoint"
            )

    def _refuse_foreign(self, on_tier: Sequence[Claim]) -> None:
        found = fencing.foreign(
            on_tier,
            known=self.attempt.known,
            job_uid=self.attempt.job_uid,
            attempt_id=self.attempt.attempt_id,
            publication=self.attempt.publication,
        )
        if found:
            self._on_foreign(found)
            named = ", ".join(f"{claim.attempt_id} of job {claim.job_uid}" for claim in found)
            raise ForeignClaimError(
                f"{self._shared.url} holds claims that this attempt does not know ({named}): another job or "
                "operator saves there. Use a separate folder or URL for each job, or stop the other job and "
                "start again"
            )
