"""The sidecar's exceptions.

SidecarError
├── SettingsError            the environment is missing or wrong
├── ContractError            a document that the protocol does not allow
│   ├── MalformedError       not a JSON object, or without a field that is needed
│   └── UnknownVersionError  written by a newer or older Holdfast
├── TransportError           a request got no usable answer
│   ├── BusyError            the other side says when to come again
│   ├── DeadlineError        not in time, however slowly it was coming
│   └── TooLargeError        the answer is larger than anything that we ask for
└── SourceError              a source of notices answered with something else than its interface says
"""


class SidecarError(Exception):
    """Base of all exceptions of the sidecar."""


class SettingsError(SidecarError):
    """The environment is missing or wrong."""


class ContractError(SidecarError):
    """A document that the protocol does not allow."""


class MalformedError(ContractError):
    """Not a JSON object, or without a field that is needed."""


class UnknownVersionError(ContractError):
    """Written by a newer or older Holdfast than this one understands."""


class TransportError(SidecarError):
    """A request got no usable answer."""


class BusyError(TransportError):
    """The other side requests a pause of this many seconds."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class DeadlineError(TransportError):
    """No complete answer in time."""


class TooLargeError(TransportError):
    """The answer is larger than any expected one."""


class SourceError(SidecarError):
    """A source of notices violated its documented interface."""
