"""Manual retention: the rules of jobs apply, and the remaining checkpoints are verified before others are deleted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.folder.upload_marker import uploading_checkpoint
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.policy import fencing
from holdfast.checkpoint.policy.retention import Decision, Entry, Rules, decide, to_delete
from holdfast.checkpoint.saving.checkpoint_index import Ages
from holdfast.checkpoint.stores.base import CheckpointStore, Target
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints.verify import verify
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import CheckpointError

LEFT: Final = timedelta(days=1)
"""Age of the last write after which an incomplete save is deleted. A save that pauses for longer fails."""


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """The decision for each checkpoint, and what the verification found."""

    decisions: Sequence[Decision]
    claims: tuple[Claim, ...]
    damaged: tuple[CheckpointName, ...]
    leftovers: tuple[str, ...]

    @property
    def lines(self) -> list[tuple[CheckpointName, bool, str]]:
        """Each checkpoint, whether it is deleted, and why; the newest first."""
        return [(one.commit.name, one.deleted, one.reason) for one in reversed(self.decisions)]

    def to_json(self) -> dict[str, Any]:
        lines = [{"commit": str(name), "goes": deleted, "reason": reason} for name, deleted, reason in self.lines]
        damaged = [str(name) for name in self.damaged]
        return {"commits": lines, "damaged": damaged, "leftovers": list(self.leftovers)}


def plan(store: CheckpointStore, rules: Rules, keep_last: int, *, now: datetime, others: bool = False) -> Pruning:
    """Decide as the job with the newest claim would. The newest checkpoints are read until `keep_last` are verified.

    `others`: also delete checkpoints of other jobs in the folder that this job never read.
    """
    claims = store.claims()
    newest = max(claims, key=_attempt_id, default=None)
    entries = Ages(store).entries()
    job_uid = "" if newest is None else newest.job_uid
    line = fencing.order((entry.commit for entry in entries), claims, job_uid=job_uid)
    verified, damaged = _newest_verified(store, [commit.name for commit in line], keep_last)
    root = _folder(store)
    decisions = decide(
        entries,
        claims,
        job_uid=job_uid,
        own=_highest(entries, newest),
        verified=verified,
        keep_last=keep_last,
        rules=rules,
        now=now,
        uploading=None if root is None else uploading_checkpoint(root),
        others=others,
    )
    left = _leftovers(store, now)
    return Pruning(decisions=decisions, claims=claims, damaged=tuple(damaged), leftovers=left)


def _leftovers(store: CheckpointStore, now: datetime) -> tuple[str, ...]:
    """Return leftovers in a folder. An object store expires incomplete uploads itself."""
    root = _folder(store)
    return () if root is None or not root.is_dir() else catalog.leftovers(root, before=now - LEFT)


def _folder(store: CheckpointStore) -> Path | None:
    return Path(store.url) if isinstance(store, FolderStore) else None


def _newest_verified(
    store: CheckpointStore, line: Sequence[CheckpointName], count: int
) -> tuple[list[CheckpointName], list[CheckpointName]]:
    verified: list[CheckpointName] = []
    damaged: list[CheckpointName] = []
    for name in line:
        if len(verified) == count:
            break
        verification = verify(store, name)
        if verification.verified:
            verified.append(name)
        elif verification.damaged:
            damaged.append(name)
    return verified, damaged


def _highest(entries: Sequence[Entry], newest: Claim | None) -> AttemptId:
    """Return the attempt above which nothing is deleted: that of the newest claim, or the last one that saved under
    it.

    Later attempts are unknown. An attempt writes a claim before it saves, so `carry_out` detects one.
    """
    if newest is None:
        return max((entry.commit.attempt_id for entry in entries), default=AttemptId(0, 0))
    own = (entry.commit.attempt_id for entry in entries if entry.commit.job_uid == newest.job_uid)
    return max(
        [
            newest.attempt_id,
            *(attempt_id for attempt_id in own if attempt_id.generation == newest.attempt_id.generation),
        ]
    )


def carry_out(store: Target, pruning: Pruning) -> None:
    """Delete, unless an attempt has written a claim meanwhile: it may depend on any checkpoint."""
    if store.claims() != pruning.claims:
        raise CheckpointError(
            f"{store.url}: an attempt has written a claim meanwhile. Nothing was deleted. Try again"
        )
    for name in to_delete(pruning.decisions):
        store.delete(name)
    root = _folder(store)
    if root is not None:
        catalog.remove_leftovers(root, pruning.leftovers)


def _attempt_id(claim: Claim) -> AttemptId:
    return claim.attempt_id
