"""A copy of the checkpoints, which may be unavailable as long as the tier before it has checkpoints. No torch.

Invariant: a job never starts from the beginning because a store was unavailable. If the tier before has checkpoints,
it has all claims too, since each was written there first. A restore requires this store in three cases: some of those
checkpoints are lost, none exists, or a claim continues a newer one. Continuing from an older checkpoint would abandon
the copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.stores.base import CheckpointStore, Source
from holdfast.checkpoint.stores.open import open_store
from holdfast.core.attempt import Claim
from holdfast.core.errors import UnavailableError

_log = logging.getLogger("holdfast.checkpoint.fallback")

Found = TypeVar("Found")


class FallbackStore:
    """A store by its URL, opened on first use, behind another store that is authoritative."""

    shared = True

    def __init__(self, url: str, first: CheckpointStore, *, in_flight: int | None = None) -> None:
        self.url = url
        self._in_flight = in_flight
        self._first = first
        self._left_out = False

    @cached_property
    def _inner(self) -> CheckpointStore:
        return open_store(self.url, in_flight=self._in_flight)

    @property
    def readers(self) -> int:
        return int(getattr(self._inner, "readers", 0))

    def commits(self) -> tuple[CheckpointName, ...]:
        """Return the checkpoints; nothing if the store is unavailable and the first one has checkpoints."""
        return self._found(lambda store: store.commits())

    def claims(self) -> tuple[Claim, ...]:
        """Return every claim; none if the store is unavailable and the first one has checkpoints."""
        return self._found(lambda store: store.claims())

    def manifest(self, name: CheckpointName) -> Manifest:
        return self._inner.manifest(name)

    def open(self, name: CheckpointName, file: str) -> Source:
        return self._inner.open(name, file)

    def quarantine(self, name: CheckpointName, reason: str) -> bool:
        return self._inner.quarantine(name, reason)

    def require(self) -> bool:
        """Try the store again if it was skipped, and return whether it was.

        Raise `UnavailableError` if it is still unavailable.
        """
        if not self._left_out:
            return False
        self._inner.commits()
        self._left_out = False
        return True

    def _found(self, read: Callable[[CheckpointStore], tuple[Found, ...]]) -> tuple[Found, ...]:
        try:
            return read(self._inner)
        except UnavailableError as error:
            if not self._first.commits():
                raise
            self._left_out = True
            _log.warning("%s is skipped: %s", self.url, error)
            return ()
