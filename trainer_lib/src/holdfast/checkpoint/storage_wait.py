"""Waiting for a folder that cannot be used now, while training keeps its state in memory. No torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from holdfast.checkpoint.policy.interval import retry_after
from holdfast.core.errors import ClaimError

_log = logging.getLogger("holdfast.checkpoint")

_SLICE_SECONDS: Final = 0.05


def until_usable(action: Callable[[bool], Any], waits: Callable[[], None] | None, check: Callable[[], None]) -> Any:
    """Try again for as long as the folder cannot be used; `action` is told whether it was tried before."""
    failed = 0
    while True:
        try:
            return action(failed > 0)
        except (OSError, ClaimError) as error:
            if waits is None or not (isinstance(error, OSError) or isinstance(error.__cause__, OSError)):
                raise
            failed += 1
            pause = max(1.0, retry_after(failed))
            _log.error("%s. Training waits with its state in memory; next try in %.0f s", error, pause)
        waits()
        until = time.monotonic() + pause
        while (left := until - time.monotonic()) > 0:
            check()
            time.sleep(min(left, _SLICE_SECONDS))
