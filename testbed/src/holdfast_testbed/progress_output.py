"""Progress messages."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_EVERY = 20.0


def say(message: str) -> None:
    """Print one line on standard error, with the time of day."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {message}\n")
    sys.stderr.flush()


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Print the start of `what`, its progress at intervals, and its duration."""
    begun = time.monotonic()
    over = threading.Event()
    say(f"{what} …")
    ticker = threading.Thread(target=_tick, args=(what, begun, over), daemon=True)
    ticker.start()
    try:
        yield
        say(f"{what}: done in {time.monotonic() - begun:.0f} s")
    finally:
        over.set()
        ticker.join()


def _tick(what: str, begun: float, over: threading.Event) -> None:
    while not over.wait(_EVERY):
        say(f"{what}: {time.monotonic() - begun:.0f} s so far")
