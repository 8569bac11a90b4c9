"""A pause of the interpreter's garbage collector, while thousands of objects that all stay are created. No torch.

Otherwise a collection would run after every 700 objects, and sometimes over the complete process: 0.13 s with torch.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
