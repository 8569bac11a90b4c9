"""How far an image in memory is filled: one thread copies, and those that write follow it. No torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Final

from holdfast.core.errors import CheckpointError

_SLICE: Final = 0.02


class Filling:
    """An image is filled from its beginning to its end."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._upto = 0
        self._trouble = ""

    def reach(self, upto: int) -> None:
        """All before this offset is there."""
        with self._changed:
            self._upto = upto
            self._changed.notify_all()

    def fail(self, trouble: str) -> None:
        """The rest will never be there."""
        with self._changed:
            self._trouble = trouble
            self._changed.notify_all()

    def wait(self, upto: int, check: Callable[[], None]) -> None:
        """Until all before this offset is there; CheckpointError if it will never be. `check` may raise to leave."""
        check()
        while not self._reached(upto):
            check()

    def _reached(self, upto: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._trouble or self._upto >= upto, _SLICE)
            if self._trouble:
                raise CheckpointError(self._trouble)
            return self._upto >= upto


FILLED: Final = Filling()
"""Of an image that is all there."""
FILLED.reach(sys.maxsize)
