"""Features of Linux: clear errors where a feature requires Linux, and fallbacks elsewhere.

Every module of Holdfast can be imported on systems without these features.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any, Final

from holdfast.core.errors import UsageError

O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)
"""The flag, or 0 on systems where all reads and writes use the page cache."""


def require(what: str, why: str) -> None:
    """Raise `UsageError` on other systems than Linux."""
    if sys.platform != "linux":
        raise UsageError(
            f"{what} needs Linux, because it {why}, and this system is {sys.platform}: run it on a Linux "
            "host or in a Linux container"
        )


def prctl() -> Any:
    """Return `prctl` of the C library. It keeps the interpreter lock, so it may be called after a fork."""
    return getattr(ctypes.PyDLL(None), "prctl", _no_prctl)


def _no_prctl(*_: int) -> None:
    require("a process that ends with its parent", "calls prctl")


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def advise(fd: int, advice: str) -> None:
    """Advise the page cache about a complete file, for example "DONTNEED". Without support, do nothing."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, getattr(os, f"POSIX_FADV_{advice}"))
