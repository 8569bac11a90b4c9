"""Every error that the operator raises itself.

OperatorError
├── AgentRequestError           an agent's request cannot be served; carries the HTTP status
├── AuthenticationUnavailableError   the API server could not say whose token it is
└── RotationError               a certificate or key Secret of ours cannot be read
"""

from __future__ import annotations


class OperatorError(Exception):
    """Base of all."""


class AgentRequestError(OperatorError):
    """An agent's request cannot be served."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AuthenticationUnavailableError(OperatorError):
    """The API server could not say whose token it is: ask again later."""


class RotationError(OperatorError):
    """A Secret of ours (CA, operator key) is there but cannot be used."""
