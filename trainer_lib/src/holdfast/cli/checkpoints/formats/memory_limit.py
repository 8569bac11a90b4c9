"""Limits the memory for reading files of unknown origin: a few bytes of a pickle may request any amount."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.core import linux

# Memory in addition to the content: threads, and the modules that they load.
SPARE_BYTES: Final = 1 << 30
# The content is in memory as raw bytes and as objects.
_TIMES: Final = 3


@contextlib.contextmanager
def bounded(held: int) -> Iterator[None]:
    """Limit the memory of this process to what files of `held` bytes can need; beyond that, MemoryError is raised.

    The limit applies to data, not to addresses: a GPU's driver may reserve more addresses than there is memory.
    """
    linux.require("reading a file that torch.save wrote", "limits the memory of this process by RLIMIT_DATA")
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = _used() + _TIMES * held + SPARE_BYTES
    limits = [most, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _used() -> int:
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) << 10
