"""The exception tree of `holdfast`. Each message says what happened and what to do next.

HoldfastError
├── UsageError               the command line or the environment cannot work as given
└── LaunchError              the launcher cannot do its part
    ├── DocumentError        a file or message of the protocol cannot be read
    │   └── VersionError     ... because it is of a version that this release does not know
    ├── ControlError         a connection between launchers was refused or broke a rule
    │   └── AuthenticationError   the other side does not hold the job's key
    ├── StoreError           the rendezvous store could not be opened
    └── SpawnError           a rank process could not be started
"""

from __future__ import annotations


class HoldfastError(Exception):
    """Base of everything that Holdfast raises on purpose."""


class UsageError(HoldfastError):
    """The command line or the environment cannot work as given."""


class LaunchError(HoldfastError):
    """The launcher cannot do its part."""


class DocumentError(LaunchError):
    """A file or message of the protocol cannot be read."""


class VersionError(DocumentError):
    """A document is of a version that this release does not know."""


class ControlError(LaunchError):
    """A connection between launchers was refused or broke a rule."""


class AuthenticationError(ControlError):
    """The other side of a connection does not hold the job's key."""


class StoreError(LaunchError):
    """The rendezvous store could not be opened."""


class SpawnError(LaunchError):
    """A rank process could not be started."""
