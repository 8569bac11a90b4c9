"""The interpreter's collector of garbage, held back while thousands of objects are made that all stay. No torch.

Each 700 of them would have it look for cycles, and now and then through all that the process has: 0.13 s with torch.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is collected meanwhile: for milliseconds, never while something is waited for.

    Only the main thread holds it back, so that no two of them undo each other's, and a process that it forks has it.
    """
    if threading.current_thread() is not threading.main_thread() or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
