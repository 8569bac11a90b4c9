"""Every error that the operator raises itself.

OperatorError
├── AgentRequestError           an agent's request cannot be served; carries the HTTP status
│   └── TooManyRequestsError    its pod asks too often; carries when it may ask again
├── AuthenticationUnavailableError   the API server could not say whose token it is
├── RotationError               a certificate or key Secret of ours cannot be read
├── UnreadableError             a resource that this version does not understand
├── SettingsError               the operator's own environment is wrong
├── WatchEndedError             a watch ended and does not begin again
├── CloudError                  a cloud did not take a machine away
└── ClusterError                the API server refused or could not answer
    ├── BlockedError            a disruption budget, or the API server's own limit: ask again later
    ├── ConflictError           what was read has changed since: plan again
    ├── NotFoundError           the object is not there (any more)
    └── RejectedError           an object of ours was refused (quota, admission, validation)
"""

from __future__ import annotations


class OperatorError(Exception):
    """Base of all errors that the operator raises."""


class AgentRequestError(OperatorError):
    """An agent's request cannot be served."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class TooManyRequestsError(AgentRequestError):
    """This pod asks too often. ``seconds``: when it may ask again."""

    def __init__(self, seconds: int) -> None:
        super().__init__(429, "this pod asks too often")
        self.seconds = seconds


class AuthenticationUnavailableError(OperatorError):
    """The API server could not say whose token it is: ask again later."""


class RotationError(OperatorError):
    """A Secret of the operator (CA, certificate, operator key) exists but cannot be used."""


class WatchEndedError(OperatorError):
    """A watch ended and does not begin again: the process must."""


class UnreadableError(OperatorError):
    """A resource that this version does not understand; the message names the field."""


class SettingsError(OperatorError):
    """The operator's own environment is wrong."""


class CloudError(OperatorError):
    """A cloud did not take a machine away; the message says what would help."""


class ClusterError(OperatorError):
    """The API server refused or could not answer."""


class BlockedError(ClusterError):
    """A disruption budget forbids it for now, or the API server limits its callers: ask again later."""


class ConflictError(ClusterError):
    """What was read has changed since: plan again."""


class NotFoundError(ClusterError):
    """The object is not there (any more)."""


class RejectedError(ClusterError):
    """An object of ours was refused; trying again helps only once something else changed."""

    def __init__(self, subject: str, reason: str, message: str) -> None:
        super().__init__(f"{subject} was refused: {message}")
        self.subject = subject
        self.reason = reason
        self.message = message
