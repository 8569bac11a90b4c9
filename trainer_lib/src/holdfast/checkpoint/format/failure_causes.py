"""The causes for which a checkpoint, or a copy of one, fails: a closed set for counters, logs and the timeline.

Pure.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from holdfast.core.errors import (
    ClaimError,
    CorruptCheckpointError,
    NoCapacityError,
    NonFiniteWeightsError,
    UnavailableError,
)


class FailureCause(StrEnum):
    """The causes of a failure. The table in `docs/reference/metrics.md` has each one with what to do about it."""

    FULL = "Full"
    READ_ONLY = "ReadOnly"
    DENIED = "Denied"
    IO = "IO"
    GONE = "Gone"
    MEMORY = "Memory"
    NETWORK = "Network"
    TIMEOUT = "Timeout"
    DAMAGED = "Damaged"
    CLAIM = "Claim"
    NO_FOLDER = "NoFolder"
    NON_FINITE = "NonFinite"
    CREDENTIALS = "Credentials"
    NO_BUCKET = "NoBucket"
    SERVER = "Server"
    THROTTLED = "Throttled"
    CORRUPTED = "Corrupted"
    CLOCK = "Clock"
    REFUSED = "Refused"
    SOURCE = "Source"
    PROCESS = "Process"
    OTHER = "Other"


_BY_ERRNO: Final[Mapping[int, FailureCause]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), FailureCause.FULL),
    errno.EROFS: FailureCause.READ_ONLY,
    **dict.fromkeys((errno.EACCES, errno.EPERM), FailureCause.DENIED),
    **dict.fromkeys((errno.EIO, errno.ENXIO, errno.EUCLEAN, errno.EBADMSG, errno.EREMOTEIO), FailureCause.IO),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENODEV), FailureCause.GONE),
    errno.ENOMEM: FailureCause.MEMORY,
    errno.ETIMEDOUT: FailureCause.TIMEOUT,
    **dict.fromkeys(
        (
            errno.ECONNREFUSED,
            errno.ECONNRESET,
            errno.ECONNABORTED,
            errno.EPIPE,
            errno.ENOTCONN,
            errno.ESHUTDOWN,
            errno.ENETDOWN,
            errno.ENETUNREACH,
            errno.ENETRESET,
            errno.EHOSTDOWN,
            errno.EHOSTUNREACH,
            errno.ESTALE,
        ),
        FailureCause.NETWORK,
    ),
}


def of_errno(number: int | None) -> FailureCause:
    """Return the cause for an error number of the operating system."""
    return FailureCause.OTHER if number is None else _BY_ERRNO.get(number, FailureCause.OTHER)


def cause_of(error: BaseException) -> FailureCause:
    """Return the cause of an error. If it wraps another error, return the cause of that one."""
    match error:
        case UnavailableError():
            return FailureCause(error.cause)
        case NoCapacityError():
            return FailureCause.FULL
        case NonFiniteWeightsError():
            return FailureCause.NON_FINITE
        case ClaimError():
            return FailureCause.CLAIM
        case CorruptCheckpointError():
            return FailureCause.DAMAGED
        case MemoryError():
            return FailureCause.MEMORY
        case TimeoutError():
            return FailureCause.TIMEOUT
        case ConnectionError():
            return FailureCause.NETWORK
        case OSError():
            return of_errno(error.errno)
    return FailureCause.OTHER if error.__cause__ is None else cause_of(error.__cause__)
