"""Waiting for the API server, which may be busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

BUSY = (0, 429, 500, 502, 503, 504)
"""Of the API server as a whole, on a machine that has much else to do."""


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 240.0) -> Any:
    """The condition's first true value. Raises when there is none in time.

    What the API server has no time to answer is asked again.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            value = condition()
        except (ApiException, HTTPError) as error:
            if not is_busy(error):
                raise
            value = None
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.1)


def is_busy(error: ApiException | HTTPError) -> bool:
    """Whether the call was right and only its time was wrong."""
    return isinstance(error, HTTPError) or error.status in BUSY
