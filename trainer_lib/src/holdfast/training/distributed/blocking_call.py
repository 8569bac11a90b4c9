"""Library calls that may block forever, on separate threads. Does not import torch."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from holdfast.core.errors import PeerLostError
from holdfast.core.interpreter import start_thread
from holdfast.training.distributed.cancel_token import CancelToken

SLICE_SECONDS: Final = 0.02


class BlockingCall:
    """A blocking call on its own thread. If the attempt ends first, its result is dropped."""

    def __init__(self, action: Callable[[], Any], cancel: CancelToken) -> None:
        self._cancel = cancel
        self._outcome: dict[str, Any] = {}
        self._done = threading.Event()
        start_thread(_run, action, self._outcome, self._done, name="holdfast-blocking")

    def wait(self) -> None:
        """Wait until the call returns, as `result` does."""
        self.result()

    def result(self, timeout: float | None = None) -> Any:
        """Return the result of the action. Raise `PeerLostError` if it failed, timed out or the attempt is over."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self._done.wait(SLICE_SECONDS):
            self._cancel.check()
            if time.monotonic() > end:
                raise PeerLostError(f"not every rank arrived within {timeout:g} s")
        error = self._outcome.pop("error", None)
        if isinstance(error, RuntimeError | OSError):
            raise peer_lost(error) from error
        if error is not None:
            raise error
        return self._outcome.pop("value")


def unless_cancelled(action: Callable[[], Any], cancel: CancelToken) -> Any:
    """Return the result of the action. Raise `PeerLostError` if it fails, or the attempt ends first."""
    return BlockingCall(action, cancel).result()


def peer_lost(error: BaseException) -> PeerLostError:
    """Convert a library's error to a `PeerLostError` with one line."""
    lines = str(error).splitlines()
    return PeerLostError(lines[0] if lines else type(error).__name__)


def _run(action: Callable[[], Any], outcome: dict[str, Any], done: threading.Event) -> None:
    try:
        outcome["value"] = action()
    except Exception as error:  # noqa: BLE001 - raised again in the waiting thread
        outcome["error"] = error
    finally:
        done.set()
