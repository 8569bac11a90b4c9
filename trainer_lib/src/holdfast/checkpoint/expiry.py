"""Deletion of the checkpoints of one shared store that retention does not keep. No torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime

from holdfast.checkpoint.attempt_info import Attempt
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.policy import fencing, retention
from holdfast.checkpoint.saving.checkpoint_index import Ages
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.stores.base import SharedStore
from holdfast.core.attempt import Claim
from holdfast.core.errors import CheckpointError

_log = logging.getLogger("holdfast.checkpoint")


class Expiry:
    """Retention of one store. `verified` has the checkpoints that were written or read back completely."""

    def __init__(
        self, store: SharedStore, *, keep_last: int, rules: retention.Rules, clock: Callable[[], datetime]
    ) -> None:
        self.verified: set[CheckpointName] = set()
        self._store = store
        self._keep_last = keep_last
        self._rules = rules
        self._clock = clock
        self._ages = Ages(store)

    def add_entry(self, snapshot: Snapshot) -> None:
        """Record a checkpoint that was just published, so that its manifest need not be read."""
        self._ages.add_entry(snapshot)

    def expire(self, attempt: Attempt, claims: tuple[Claim, ...]) -> None:
        """Delete old checkpoints. If a newer attempt has claimed, delete nothing: it may continue any of them.

        This method runs on the thread of a save. `attempt` is the attempt that saved; the job may be in another one
        by now.
        """
        try:
            on_tier = self._store.claims()
            fence = fencing.union(on_tier, claims)
            if any(claim.attempt_id > attempt.attempt_id for claim in on_tier):
                _log.warning(
                    "a newer attempt than %s has written a claim: no checkpoint is deleted", attempt.attempt_id
                )
                return
            decided = retention.decide(
                self._ages.entries(),
                fence,
                job_uid=attempt.job_uid,
                own=attempt.attempt_id,
                verified=frozenset(self.verified),
                keep_last=self._keep_last,
                rules=self._rules,
                now=self._clock(),
                uploading=self._store.uploading(),
            )
            for name in retention.to_delete(decided):
                self._store.delete(name)
        except (OSError, CheckpointError) as error:
            _log.warning("retention could not list %s: %s", self._store.url, error)
