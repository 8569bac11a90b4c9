"""The interpreter's exit and its garbage collector. No torch.

A regular exit waits for a limited time for daemon threads that call C++ libraries. A thread that returns from such a
library, or frees a tensor, while the interpreter exits would abort the process.

While thousands of objects that all stay are created, a collection would run after every 700 of them, and sometimes
over the complete process: 0.13 s with torch.
"""

from __future__ import annotations

import atexit
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection in a context that lasts milliseconds, and never in one that waits.

    Only the main thread disables it, so that two threads cannot undo each other's change. The context also ends in a
    process that the thread forks.
    """
    if threading.current_thread() is not threading.main_thread() or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
