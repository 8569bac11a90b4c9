"""Waits for conditions, always with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast_testbed.errors import NotReadyError


def wait_for(
    condition: Callable[[], bool],
    *,
    what: str,
    seconds: float,
    every: float = 0.05,
    explain: Callable[[], str] = lambda: "",
) -> None:
    """Return when `condition` holds. After the deadline, raise an error with `what` and the explanation."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            raise NotReadyError(f"{what}: not true after {seconds:.0f} s. {explain()}".rstrip())
        time.sleep(every)
