"""What an error of an S3 client means, and the errors that the S3 bucket raises. Pure: it imports no client.

Invariant: only an answer that the object is not there is damage. Trouble on the way, with credentials, rights or room
says nothing about what lies in the bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from holdfast.checkpoint.format.failure_causes import FailureCause
from holdfast.core.errors import CheckpointError, UnavailableError
from holdfast.core.limits import backoff


class Kind(StrEnum):
    """What is wrong; those below `UNAVAILABLE` are words for counters."""

    MISSING = "Missing"
    TAKEN = "Taken"
    NO_UPLOAD = "NoUpload"
    NETWORK = FailureCause.NETWORK
    SERVER = FailureCause.SERVER
    THROTTLED = FailureCause.THROTTLED
    CORRUPTED = FailureCause.CORRUPTED
    CREDENTIALS = FailureCause.CREDENTIALS
    DENIED = FailureCause.DENIED
    NO_BUCKET = FailureCause.NO_BUCKET
    FULL = FailureCause.FULL
    CLOCK = FailureCause.CLOCK
    REFUSED = FailureCause.REFUSED


class Lack(StrEnum):
    """What a server was found to lack, and what is done instead."""

    CONDITIONS = (
        "it does not honour If-None-Match: an object is looked for, written and read back instead. Give each job a "
        "prefix of its own, because two that write in the same moment could overwrite each other's checkpoints"
    )
    CRC64NVME = "it refuses CRC64NVME checksums of whole objects: SHA-256 of each part is compared instead"
    DELETIONS = "it refuses DeleteObjects: objects are deleted one by one"
    UPLOADS = (
        "it refuses ListMultipartUploads: interrupted uploads start over, and their parts stay. Give the bucket a "
        "lifecycle rule that aborts incomplete multipart uploads"
    )


class TakenError(CheckpointError):
    """The object is there, or is another one than before."""


class RefusedError(UnavailableError):
    """The server does not do what was asked for."""


class NoUploadError(CheckpointError):
    """The multipart upload is not there."""


RETRIED: Final = frozenset({Kind.NETWORK, Kind.SERVER, Kind.THROTTLED, Kind.CORRUPTED})

# What a store that was reached answers to the job itself, whatever node asks.
OF_THE_JOB: Final = frozenset({Kind.CREDENTIALS, Kind.DENIED, Kind.NO_BUCKET, Kind.FULL})

ADVICE: Final[Mapping[Kind, str]] = {
    Kind.NETWORK: "the store cannot be reached: look at the network and at AWS_ENDPOINT_URL_S3",
    Kind.SERVER: "the store answers with its own error: try later, or look at the store",
    Kind.THROTTLED: "the store asks for fewer requests: give a lower bandwidth limit or a longer interval",
    Kind.CORRUPTED: "bytes change on their way to the store: look at the network and at proxies in between",
    Kind.CREDENTIALS: "credentials are missing, wrong or expired: renew the secret",
    Kind.DENIED: "the credentials may not do this: give them rights to list, read, write and delete below the prefix",
    Kind.NO_BUCKET: "there is no such bucket: create it, or mend the URL",
    Kind.FULL: "the bucket is full: make room, raise the quota, or keep fewer commits",
    Kind.CLOCK: "this machine's clock differs from the store's: set it",
    Kind.REFUSED: "the store refuses the request",
}

_CODES: Final[Mapping[str, Kind]] = {
    **dict.fromkeys(("NoSuchKey", "NotFound", "404", "NoSuchVersion"), Kind.MISSING),
    **dict.fromkeys(("PreconditionFailed", "412"), Kind.TAKEN),
    "NoSuchUpload": Kind.NO_UPLOAD,
    **dict.fromkeys(("SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "429"), Kind.THROTTLED),
    **dict.fromkeys(("BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"), Kind.CORRUPTED),
    **dict.fromkeys(("IncompleteBody", "RequestTimeout"), Kind.NETWORK),
    **dict.fromkeys(("ConditionalRequestConflict", "OperationAborted"), Kind.SERVER),
    **dict.fromkeys(
        ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "InvalidAccessKeyId"),
        Kind.CREDENTIALS,
    ),
    **dict.fromkeys(("SignatureDoesNotMatch", "XAdminUserNotFound"), Kind.CREDENTIALS),
    **dict.fromkeys(("AccessDenied", "AllAccessDisabled", "AccountProblem", "403"), Kind.DENIED),
    "NoSuchBucket": Kind.NO_BUCKET,
    **dict.fromkeys(("QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "507"), Kind.FULL),
    "RequestTimeTooSkewed": Kind.CLOCK,
    **dict.fromkeys(("NotImplemented", "501"), Kind.REFUSED),
}

_LONGEST_MESSAGE: Final = 200

_CREDENTIALS: Final = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"}
)


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What is wrong, and in which words the store or the client said so."""

    kind: Kind
    said: str

    @property
    def passes(self) -> bool:
        """Whether the same request may succeed in a moment."""
        return self.kind in RETRIED

    @property
    def advice(self) -> str:
        """What happened and what to do."""
        return f"{ADVICE.get(self.kind, 'unexpected answer')} ({self.said})"


def trouble_of(error: Exception) -> Trouble:
    """Judge an error of boto3, or of the connection below it."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping) and "Error" in response:
        return _of_answer(response)
    kind = Kind.CREDENTIALS if type(error).__name__ in _CREDENTIALS else Kind.NETWORK
    return Trouble(kind=kind, said=type(error).__name__)


def _of_answer(response: Mapping[str, Any]) -> Trouble:
    code = str(response["Error"].get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    # A 404 under another name says that something is missing, and not that it is the object.
    by_status = None if status == 404 and code else _CODES.get(str(status))
    kind = _CODES.get(code) or by_status or (Kind.SERVER if status >= 500 else Kind.REFUSED)
    said = f"{status} {code}".strip()
    if kind is Kind.REFUSED:  # what is refused stands in the message only
        message = " ".join(str(response["Error"].get("Message") or "").split())[:_LONGEST_MESSAGE]
        said = f"{said}: {message}" if message else said
    return Trouble(kind=kind, said=said)


def pause(attempt: int, *, base: float, cap: float, draw: float) -> float:
    """Seconds before the attempt after this one (0, 1, …); `draw` in [0, 1) spreads clients that failed together."""
    return backoff(attempt, first=base, longest=cap) * (0.5 + draw / 2)
