"""The interpreter's collector of garbage, held back while thousands of objects are made that all stay. No torch.

Each 700 of them would have it look for cycles, and now and then through all that the process has: 0.13 s with torch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is collected meanwhile, in no thread: for milliseconds, never while something is waited for."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
