"""A progress bar for long reads. It is shown on a terminal only."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TextIO

from holdfast.core.settings import format_size

_EVERY_SECONDS: Final = 0.1
_WIDTH: Final = 24


class Progress:
    """Counts bytes, from any thread."""

    def __init__(self, label: str, total: int, stream: TextIO | None) -> None:
        self._label = label
        self._total = total
        self._stream = stream
        self._done = 0
        self._started = self._drawn = time.monotonic()
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Add processed bytes."""
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if self._stream is not None and now - self._drawn >= _EVERY_SECONDS:
                self._drawn = now
                self._draw(self._stream, now)

    def _draw(self, stream: TextIO, now: float) -> None:
        share = min(1.0, self._done / self._total) if self._total else 1.0
        filled = int(share * _WIDTH)
        speed = self._done / max(1e-9, now - self._started)
        bar = "#" * filled + "." * (_WIDTH - filled)
        stream.write(f"\r\x1b[K{self._label} [{bar}] {share:4.0%} {format_size(self._done)}, {format_size(speed)}/s")
        stream.flush()

    def clear(self) -> None:
        """Erase the bar."""
        if self._stream is not None:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


@contextmanager
def progress(label: str, total: int) -> Iterator[Progress]:
    """Show a bar on the error stream during the block, if that is a terminal."""
    shown = Progress(label, total, sys.stderr if sys.stderr.isatty() else None)
    try:
        yield shown
    finally:
        shown.clear()


def printable(text: str) -> str:
    """Return the text with control characters replaced: text of a manifest must not control the terminal."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)
