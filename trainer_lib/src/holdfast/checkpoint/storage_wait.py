"""Retry while the shared store cannot be used, and keep the training state in memory. No torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from holdfast.checkpoint.policy.interval import retry_after
from holdfast.core.errors import ClaimError, UnavailableError

_log = logging.getLogger("holdfast.checkpoint")

_SLICE_SECONDS: Final = 0.05


def until_usable(action: Callable[[bool], Any], waits: Callable[[], None] | None, check: Callable[[], None]) -> Any:
    """Run `action` until the store can be used. The argument of `action` is True after a failed try."""
    failed = 0
    while True:
        try:
            return action(failed > 0)
        except (OSError, ClaimError, UnavailableError) as error:
            if waits is None or (isinstance(error, ClaimError) and not isinstance(error.__cause__, OSError)):
                raise
            failed += 1
            pause = max(1.0, retry_after(failed))
            _log.error("%s. Training waits with its state in memory; next attempt in %.0f s", error, pause)
        waits()
        until = time.monotonic() + pause
        while (left := until - time.monotonic()) > 0:
            check()
            time.sleep(min(left, _SLICE_SECONDS))
