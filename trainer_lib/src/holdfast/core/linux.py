"""What of Holdfast needs Linux says so elsewhere; the command line's help and version do not need it."""

from __future__ import annotations

import sys

from holdfast.core.errors import UsageError


def require(what: str) -> None:
    """Raise UsageError where this is not Linux."""
    if sys.platform != "linux":
        raise UsageError(f"{what} needs Linux, and this is {sys.platform}: run it on a Linux host or in a container")
