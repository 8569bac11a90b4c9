"""Retry while the shared store cannot be used. No torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from holdfast.checkpoint.format.failure_causes import FailureCause
from holdfast.checkpoint.policy.interval import retry_after
from holdfast.core.errors import ClaimError, UnavailableError

_log = logging.getLogger("holdfast.checkpoint")

_SLICE_SECONDS: Final = 0.05
_OUTAGES: Final = frozenset({FailureCause.NETWORK, FailureCause.SERVER, FailureCause.THROTTLED})

Waits = Callable[[], None]
"""Called before each pause. It may raise to stop waiting."""


def until_usable(action: Callable[[bool], Any], waits: Waits | None, check: Callable[[], None]) -> Any:
    """Run `action` until the store can be used, and keep the training state in memory.

    The argument of `action` is True after a failed try.
    """
    return _until(action, waits, check, _concerns_store, "Training waits with its state in memory")


def until_answered(action: Callable[[bool], Any], waits: Waits | None, check: Callable[[], None]) -> Any:
    """Run `action` until the store answers. An answer that refuses the request raises: nobody may correct it soon."""
    return _until(action, waits, check, _is_outage, "The restore waits")


def _concerns_store(error: Exception) -> bool:
    return not isinstance(error, ClaimError) or isinstance(error.__cause__, OSError)


def _is_outage(error: Exception) -> bool:
    return isinstance(error, UnavailableError) and error.cause in _OUTAGES


def _until(
    action: Callable[[bool], Any],
    waits: Waits | None,
    check: Callable[[], None],
    passes: Callable[[Exception], bool],
    what: str,
) -> Any:
    failed = 0
    while True:
        try:
            return action(failed > 0)
        except (OSError, ClaimError, UnavailableError) as error:
            if waits is None or not passes(error):
                raise
            failed += 1
            pause = max(1.0, retry_after(failed))
            _log.error("%s. %s; next attempt in %.0f s", error, what, pause)
        waits()
        until = time.monotonic() + pause
        while (left := until - time.monotonic()) > 0:
            check()
            time.sleep(min(left, _SLICE_SECONDS))
