"""The progress of filling an image in memory: one thread copies, and the writers follow it. No torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Final

from holdfast.core.errors import CheckpointError

_SLICE: Final = 0.02


class Filling:
    """The progress of an image that is filled from its beginning to its end."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._upto = 0
        self._reason = ""

    def reach(self, upto: int) -> None:
        """Record that all bytes before this offset are filled."""
        with self._changed:
            self._upto = upto
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Record that the rest will never be filled."""
        with self._changed:
            self._reason = reason
            self._changed.notify_all()

    def wait(self, upto: int, check: Callable[[], None]) -> None:
        """Wait until all bytes before this offset are filled.

        Raise `CheckpointError` if they will never be filled. `check` may raise to stop waiting.
        """
        check()
        while not self._reached(upto):
            check()

    def _reached(self, upto: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._reason or self._upto >= upto, _SLICE)
            if self._reason:
                raise CheckpointError(self._reason)
            return self._upto >= upto


FILLED: Final = Filling()
"""The progress of an image that is already filled."""
FILLED.reach(sys.maxsize)
