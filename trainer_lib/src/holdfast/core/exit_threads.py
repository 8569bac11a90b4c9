"""Daemon threads that call C++ libraries. No torch.

A regular exit of the interpreter waits for them for a limited time. A thread that returns from such a
library, or frees a tensor, while the interpreter exits would abort the process.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

# The longest wait of a regular exit, in seconds.
EXIT_SECONDS: Final = 1.0
_threads: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()


def start_thread(target: Callable[..., None], *args: Any, name: str) -> threading.Thread:
    """Start a thread that may block forever in a library and does not prevent the exit of the process."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    _threads.add(thread)
    return thread


@atexit.register
def _join() -> None:
    end = time.monotonic() + EXIT_SECONDS
    for thread in tuple(_threads):
        thread.join(max(0.0, end - time.monotonic()))
