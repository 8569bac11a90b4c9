"""The version of PyTorch in this environment, without importing it.

The distribution does not depend on torch: pip would replace a build of a vendor, whose version is often an early one.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from typing import Final

from holdfast.core.errors import UsageError

Release = tuple[int, int]
MINIMUM: Final[Release] = (2, 8)
SHARDING: Final[Release] = (2, 13)
"""The first release whose FSDP2 has the options that `job.fully_shard` sets."""


def installed() -> str | None:
    """Return the version of torch; None if it is missing or has no metadata."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def require(minimum: Release = MINIMUM, what: str = "Holdfast") -> None:
    """Raise `UsageError` if torch is missing or too old for `what`. A build without metadata is accepted."""
    install = f"install torch {minimum[0]}.{minimum[1]} or newer"
    version = installed()
    if version is None and importlib.util.find_spec("torch") is None:
        raise UsageError(f"torch is not installed in this environment: {install}")
    if version is not None and is_too_old(version, minimum):
        raise UsageError(f"torch {version} is too old for {what}: {install}")


def is_too_old(version: str, minimum: Release) -> bool:
    """Return whether a version, such as `2.8.0a0+34c6371d24.nv25.08`, is below the minimum."""
    release = re.match(r"(\d+)\.(\d+)", version)
    return release is not None and (int(release[1]), int(release[2])) < minimum
