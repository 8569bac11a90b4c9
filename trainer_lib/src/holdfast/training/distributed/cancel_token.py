"""Cancellation of one attempt, for any thread. Does not import torch."""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.core.errors import PeerLostError


class CancelToken:
    """Cancellation token of one attempt. Any thread may cancel; every wait checks. The first reason wins."""

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self.waited: Callable[[float], None] | None = None
        """Called regularly during a wait with the seconds that it has lasted. It may raise."""

    def set(self, reason: str) -> None:
        """Cancel the attempt for every thread that waits in it."""
        self._reasons.append(reason)

    def is_set(self) -> bool:
        """Return whether the attempt is over."""
        return bool(self._reasons)

    @property
    def reason(self) -> str:
        """The first reason; "" while the attempt runs."""
        return self._reasons[0] if self._reasons else ""

    def check(self) -> None:
        """Raise `PeerLostError` if the attempt is over."""
        if self._reasons:
            raise PeerLostError(f"the attempt is over: {self._reasons[0]}")

    def check_since(self, began: float) -> None:
        """Check in a wait that began at this time, and call `waited`."""
        self.check()
        if self.waited is not None:
            self.waited(time.monotonic() - began)
