"""How much memory reading what others wrote may take: a few bytes of a pickle may ask for any amount."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.core import linux

# Beside what is read: of threads, and of what they load to read it.
SPARE_BYTES: Final = 1 << 30
# Bytes that were read lie there as they came, and as what they are.
_TIMES: Final = 3


@contextlib.contextmanager
def bounded(held: int) -> Iterator[None]:
    """While files of `held` bytes are read, this process gets no more memory than such can need: MemoryError.

    Of its data, not of its addresses: of those a GPU's driver may take more than there is memory at any time.
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
