"""What only Linux has: clear errors for what needs it, and what the rest does elsewhere.

Every module of Holdfast can be imported where these names are missing.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any, Final

from holdfast.core.errors import UsageError

O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)
"""0 where files can only be read and written through the page cache."""


def require(what: str, why: str) -> None:
    """Raise UsageError where this is not Linux."""
    if sys.platform != "linux":
        raise UsageError(
            f"{what} needs Linux, because it {why}, and this is {sys.platform}: "
            "run it on a Linux host or in a Linux container"
        )


def prctl() -> Any:
    """Return the function of the C library. It keeps the interpreter's lock: it may be called after a fork."""
    return getattr(ctypes.PyDLL(None), "prctl", _no_prctl)


def _no_prctl(*_: int) -> None:
    require("a process that ends with its parent", "calls prctl")


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def advise(fd: int, advice: str) -> None:
    """Advise the page cache about a whole file, such as "DONTNEED"; without effect where there is no such advice."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, getattr(os, f"POSIX_FADV_{advice}"))
