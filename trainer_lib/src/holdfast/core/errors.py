"""The exception tree of `holdfast`. Each message says what happened and what to do next.

HoldfastError
├── UsageError               the command line, the environment or a call cannot work as given
├── StateError               what `manage` was given cannot be saved, or does not fit what was saved
├── DataError                the dataset is not the one whose position was saved
├── NonFiniteError           loss or gradients were not finite too many steps in a row
├── PeerLostError            a collective failed: another rank is gone
├── InvariantError           a rule that keeps the state right would be broken: a defect of Holdfast
├── DemoError                something that the demo waits for did not happen
├── ChaosError               `holdfast chaos` was asked to raise this in the script
├── CheckpointError          a checkpoint cannot be written or read
│   ├── DamagedError         ... because its bytes are not those that were written
│   ├── SuspectError         ... because one rank alone reads it badly: its machine is suspect
│   ├── NoneWholeError       ... because there are commits, and none of them is whole
│   ├── UnknownFormatError   ... because another program or a newer release wrote it
│   ├── ElsewhereError       ... because the part that is asked for is on another node
│   ├── NonFiniteWeightsError    ... because weights in it are not finite
│   ├── NoRoomError          ... because the memory tier is too small for it
│   ├── UnavailableError     ... because the store cannot be used now: network, credentials, rights, room
│   └── ClaimError           the right to commit could not be had
│       └── ForeignClaimError    ... because another job or operator uses the folder
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
    """The command line, the environment or a call cannot work as given."""


class StateError(HoldfastError):
    """What `manage` was given cannot be saved, or does not fit what was saved."""


class DataError(HoldfastError):
    """The dataset is not the one whose position was saved."""


class NonFiniteError(HoldfastError):
    """Loss or gradients were not finite too many steps in a row."""


class PeerLostError(HoldfastError):
    """A collective failed: another rank is gone. Not this process's fault."""


class InvariantError(HoldfastError):
    """A rule that keeps the state right would be broken: a defect of Holdfast, and nothing was changed."""


class DemoError(HoldfastError):
    """Something that the demo waits for did not happen."""


class ChaosError(HoldfastError):
    """`holdfast chaos` was asked to raise this in the script."""


class CheckpointError(HoldfastError):
    """A checkpoint cannot be written or read."""


class DamagedError(CheckpointError):
    """The bytes of a checkpoint are not those that were written."""


class SuspectError(CheckpointError):
    """One rank alone reads a checkpoint badly: not the checkpoint is suspect but that rank's machine."""


class NoneWholeError(CheckpointError):
    """There are commits, and none of them can be restored: nothing was moved, and nobody begins anew over them."""


class UnknownFormatError(CheckpointError):
    """Another program or a newer release wrote the checkpoint; it is left alone."""


class ElsewhereError(CheckpointError):
    """A part of a commit is on another node, and nothing is known of it here."""


class NonFiniteWeightsError(CheckpointError):
    """A weight is infinite or NaN: a checkpoint of it is not published, and those before it stay."""


class NoRoomError(CheckpointError):
    """The memory tier or the local one is too small for a commit."""


class UnavailableError(CheckpointError):
    """A store cannot be used now; nothing follows from that for what lies in it. `cause` is a word for counters."""

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class ClaimError(CheckpointError):
    """The right to commit could not be had."""


class ForeignClaimError(ClaimError):
    """Another job or operator uses the checkpoint folder."""


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
