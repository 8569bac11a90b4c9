"""Every error that the operator raises itself.

OperatorError
├── AgentRequestError           an agent's request cannot be served; has the HTTP status
│   └── TooManyRequestsError    the pod sends too many requests; has the time until the next one
├── AuthenticationUnavailableError   the API server could not review a token
├── RotationError               a certificate or key Secret of the operator cannot be read
├── UnreadableError             a resource that this version does not support
├── SettingsError               the operator's own environment is wrong
├── WatchEndedError             a watch ended and cannot be restarted
├── CloudError                  a cloud did not terminate a machine
└── ClusterError                the API server rejected a request or could not answer
    ├── BlockedError            a disruption budget, or the API server's rate limit: retry later
    ├── ConflictError           the object has changed since it was read: plan again
    ├── NotFoundError           the object does not exist, or no longer
    └── RejectedError           an object of the operator was rejected (quota, admission, validation)
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
    """The pod sends too many requests. ``seconds``: the time until the next one is accepted."""

    def __init__(self, seconds: int) -> None:
        super().__init__(429, "this pod sends too many requests")
        self.seconds = seconds


class AuthenticationUnavailableError(OperatorError):
    """The API server could not review a token: retry later."""


class RotationError(OperatorError):
    """A Secret of the operator (CA, certificate, operator key) exists but cannot be used."""


class WatchEndedError(OperatorError):
    """A watch ended and cannot be restarted, so the process must restart."""


class UnreadableError(OperatorError):
    """A resource that this version does not support; the message names the field."""


class SettingsError(OperatorError):
    """The operator's own environment is wrong."""


class CloudError(OperatorError):
    """A cloud did not terminate a machine; the message contains the fix."""


class ClusterError(OperatorError):
    """The API server rejected a request or could not answer."""


class BlockedError(ClusterError):
    """A disruption budget forbids it for now, or the API server limits its clients: retry later."""


class ConflictError(ClusterError):
    """The object has changed since it was read: plan again."""


class NotFoundError(ClusterError):
    """The object does not exist, or no longer."""


class RejectedError(ClusterError):
    """The API server rejected an object of the operator. A retry helps only after another change."""

    def __init__(self, subject: str, reason: str, message: str) -> None:
        super().__init__(f"{subject} was refused: {message}")
        self.subject = subject
        self.reason = reason
        self.message = message
