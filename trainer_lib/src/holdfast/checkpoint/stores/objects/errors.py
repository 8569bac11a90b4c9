"""The meaning of an S3 client's errors, and the errors that the S3 bucket raises. Pure: imports no client.

Invariant: only a reply that the object is missing counts as lost data. Errors of the network, credentials,
permissions or capacity allow no conclusion about the bucket's content.
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
    """The kind of an error. Those from `NETWORK` on are also causes for counters."""

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
    """A feature that a server lacks, and its replacement."""

    CONDITIONS = (
        "it does not support If-None-Match: Holdfast checks for an object, writes it and reads it back "
        "instead. Use a separate prefix for each job, because two jobs that write at the same time could "
        "overwrite each other's checkpoints"
    )
    CRC64NVME = "it refuses CRC64NVME checksums of complete objects: SHA-256 of each part is compared instead"
    DELETIONS = "it refuses DeleteObjects: objects are deleted one by one"
    UPLOADS = (
        "it refuses ListMultipartUploads: interrupted uploads start over, and their parts stay. Set a "
        "lifecycle rule in the bucket that aborts incomplete multipart uploads"
    )


class TakenError(CheckpointError):
    """The object exists, or is another one than before."""


class RefusedError(UnavailableError):
    """The server does not support the request."""


class NoUploadError(CheckpointError):
    """The multipart upload does not exist."""


RETRIED: Final = frozenset({Kind.NETWORK, Kind.SERVER, Kind.THROTTLED, Kind.CORRUPTED})

# Errors from a reachable store that concern the job, on any node.
OF_THE_JOB: Final = frozenset({Kind.CREDENTIALS, Kind.DENIED, Kind.NO_BUCKET, Kind.FULL})

ADVICE: Final[Mapping[Kind, str]] = {
    Kind.NETWORK: "the store cannot be reached: check the network and AWS_ENDPOINT_URL_S3",
    Kind.SERVER: "the store reports an error of its own: try later, or check the store",
    Kind.THROTTLED: "the store asks for fewer requests: set a lower bandwidth limit or a longer interval",
    Kind.CORRUPTED: "bytes change in transfer to the store: check the network and its proxies",
    Kind.CREDENTIALS: "credentials are missing, wrong or expired: renew the secret",
    Kind.DENIED: "the credentials lack permissions: allow them to list, read, write and delete below the prefix",
    Kind.NO_BUCKET: "the bucket does not exist: create it, or correct the URL",
    Kind.FULL: "the bucket is full: free space, raise the quota, or keep fewer checkpoints",
    Kind.CLOCK: "this machine's clock differs from the store's: synchronise it",
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
class RequestFailure:
    """The kind of an error, and the text of the store or the client."""

    kind: Kind
    text: str

    @property
    def passes(self) -> bool:
        """Whether the same request may succeed shortly."""
        return self.kind in RETRIED

    @property
    def advice(self) -> str:
        """What happened, and what to do."""
        return f"{ADVICE.get(self.kind, 'unexpected answer')} ({self.text})"


def classify(error: Exception) -> RequestFailure:
    """Classify an error of boto3, or of the connection below it."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping) and "Error" in response:
        return _of_answer(response)
    kind = Kind.CREDENTIALS if type(error).__name__ in _CREDENTIALS else Kind.NETWORK
    return RequestFailure(kind=kind, text=type(error).__name__)


def _of_answer(response: Mapping[str, Any]) -> RequestFailure:
    code = str(response["Error"].get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    # With another code, a 404 means that something is missing, but not the object.
    by_status = None if status == 404 and code else _CODES.get(str(status))
    kind = _CODES.get(code) or by_status or (Kind.SERVER if status >= 500 else Kind.REFUSED)
    text = f"{status} {code}".strip()
    if kind is Kind.REFUSED:  # other messages are not needed
        message = " ".join(str(response["Error"].get("Message") or "").split())[:_LONGEST_MESSAGE]
        text = f"{text}: {message}" if message else text
    return RequestFailure(kind=kind, text=text)


def pause(attempt: int, *, base: float, cap: float, draw: float) -> float:
    """Return the seconds before the attempt after this one (0, 1, …). `draw` in [0, 1) spreads out clients."""
    return backoff(attempt, first=base, longest=cap) * (0.5 + draw / 2)
