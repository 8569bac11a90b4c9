"""Returns to an older checkpoint if training repeatedly fails after the newest ones.

It writes a claim that continues from the older checkpoint. This claim fences the newer ones on every tier, as the
claim of any attempt does. Its generation is new: later attempts under the newest claim wrote no claim, and may have
checkpoints only in the memory or on the disk of a node.

A launcher that still trains stops because of the claim, and its job continues in a higher generation. Newer
checkpoints are moved to `quarantine/` as well, because retention deletes fenced ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.policy import fencing
from holdfast.checkpoint.policy.fencing import Commit
from holdfast.checkpoint.saving.checkpoint_index import Ages
from holdfast.checkpoint.stores.base import SharedStore
from holdfast.cli.checkpoints.verify import verify
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import CheckpointError, CorruptCheckpointError, UsageError


@dataclass(frozen=True, kw_only=True)
class Rewinding:
    """The plan: the claim, and the checkpoints to move, the oldest first."""

    claim: Claim
    base: CheckpointName
    newer: tuple[CheckpointName, ...]

    def to_json(self) -> dict[str, Any]:
        return {"commit": str(self.base), "claim": self.claim.to_json(), "setAside": [str(one) for one in self.newer]}


def plan(store: SharedStore, step: int) -> Rewinding:
    """Return to the checkpoint of `step` that the job with the newest claim would read, after verifying it.

    Raise UsageError if the store is no job's or has no such checkpoint; CorruptCheckpointError if it is corrupt.
    """
    claims = store.claims()
    if not claims:
        raise UsageError(
            f"{store.url} has no claims, so no job resumes from it: load one of its checkpoints by its step"
        )
    top = max(claims, key=lambda claim: claim.attempt_id)
    commits = [entry.commit for entry in Ages(store).entries()]
    line = fencing.order(commits, claims, job_uid=top.job_uid)
    base = _base(store, line, step)
    claim = Claim(
        attempt_id=AttemptId(store.highest_generation() + 1, 1),
        job_uid=top.job_uid,
        publication=top.publication,
        from_step=base.step,
        from_attempt_id=base.attempt_id,
    )
    ours = {commit.name for commit in (*line, *(one for one in commits if one.job_uid == top.job_uid))}
    cut = {commit.name for commit in commits if fencing.cuts(claim, commit)}
    newer = sorted(ours & cut)
    return Rewinding(claim=claim, base=base, newer=tuple(newer))


def carry_out(store: SharedStore, rewinding: Rewinding) -> None:
    """Write the claim, then move. If the process is killed in between, it may run again."""
    store.write_claim(rewinding.claim)
    for name in reversed(rewinding.newer):  # a dependent checkpoint before its base
        try:
            store.set_aside(name, f"the job went back to {rewinding.base}")
        except CheckpointError as error:
            raise CheckpointError(
                f"the job resumes from {rewinding.base}, but {error}. Copy {name} before the job continues training, "
                "because retention deletes it later"
            ) from error


def _base(store: SharedStore, line: Sequence[Commit], step: int) -> CheckpointName:
    found = next((commit.name for commit in line if commit.step == step), None)
    if found is None:
        there = ", ".join(str(commit.step) for commit in reversed(line)) or "none"
        raise UsageError(
            f"{store.url} has no checkpoint of step {step} that the job would read; it has steps: {there}"
        )
    verification = verify(store, found)
    if not verification.verified:
        raise CorruptCheckpointError(
            f"{found} is not complete: {verification.reason or verification.unknown}. Nothing was changed"
        )
    return found
