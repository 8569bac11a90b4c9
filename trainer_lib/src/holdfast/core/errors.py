"""The exceptions of `holdfast`. Each message states what happened and what to do.

HoldfastError
├── UsageError               the command line, the environment or a call is not valid
├── StateError               an object of `manage` cannot be saved, or does not fit the saved state
├── DataError                the dataset is not the one whose position was saved
├── NonFiniteError           loss or gradients were not finite in too many consecutive steps
├── BadSampleError           more samples of the dataset cannot be read than the guards allow
├── ReplicaError             the replicas hold different states, and no state has a majority
├── PeerLostError            a collective failed: another rank is lost
├── InvariantError           a rule that keeps the state correct would be broken: a defect of Holdfast
├── DemoError                an event that the demo expects did not happen
├── CheckError               `holdfast resume-check` cannot compare: the script failed or made no checkpoint
├── ChaosError               `holdfast chaos` injected this error into the script
├── CheckpointError          a checkpoint cannot be written or read
│   ├── CorruptCheckpointError    ... because its bytes are not those that were written
│   ├── SuspectError              ... because only one rank reads it incorrectly: its machine is suspect
│   ├── NoCompleteCheckpointError ... because there are checkpoints, and none of them is complete
│   ├── UnknownFormatError        ... because another program or a newer release wrote it
│   ├── OtherNodeError            ... because the requested part is on another node
│   ├── NonFiniteWeightsError     ... because weights in it are not finite
│   ├── NoCapacityError           ... because the memory tier has too little capacity for it
│   ├── UnavailableError          ... because the store is unavailable: network, credentials, permissions, capacity
│   └── ClaimError                the right to save could not be acquired
│       └── ForeignClaimError    ... because another job or operator uses the folder
└── LaunchError              the launcher cannot continue
    ├── DocumentError        a file or message of the protocol cannot be read
    │   └── VersionError     ... because this release does not know its version
    ├── ControlError         a connection between launchers was refused or broke a rule
    │   └── AuthenticationError   the other side does not have the job's key
    ├── StoreError           the rendezvous store could not be opened
    └── SpawnError           a rank process could not be started
"""

from __future__ import annotations


class HoldfastError(Exception):
    """Base of all exceptions that Holdfast raises intentionally."""


class UsageError(HoldfastError):
    """The command line, the environment or a call is not valid."""


class StateError(HoldfastError):
    """An object of `manage` cannot be saved, or does not fit the saved state."""


class DataError(HoldfastError):
    """The dataset is not the one whose position was saved."""


class NonFiniteError(HoldfastError):
    """Loss or gradients were not finite in too many consecutive steps."""


class BadSampleError(HoldfastError):
    """More samples of the dataset cannot be read than `Guards.max_bad_samples` allows."""


class ReplicaError(HoldfastError):
    """The replicas hold different states, and no state has a majority."""


class PeerLostError(HoldfastError):
    """A collective failed because another rank is lost. This process did not cause it."""


class InvariantError(HoldfastError):
    """A rule that keeps the state correct would be broken: a defect of Holdfast. Nothing was changed."""


class DemoError(HoldfastError):
    """An event that the demo expects did not happen."""


class CheckError(HoldfastError):
    """`holdfast resume-check` cannot compare, because the script failed or made no checkpoint."""


class ChaosError(HoldfastError):
    """`holdfast chaos` injected this error into the script."""


class CheckpointError(HoldfastError):
    """A checkpoint cannot be written or read."""


class CorruptCheckpointError(CheckpointError):
    """The bytes of a checkpoint are not those that were written."""


class SuspectError(CheckpointError):
    """Only one rank reads a checkpoint incorrectly, so its machine is suspect, and not the checkpoint."""


class NoCompleteCheckpointError(CheckpointError):
    """There are checkpoints, and none can be restored. Nothing was moved, and training does not start over."""


class UnknownFormatError(CheckpointError):
    """Another program or a newer release wrote the checkpoint, which is not changed."""


class OtherNodeError(CheckpointError):
    """A part of a checkpoint is on another node, and this node has no data about it."""


class NonFiniteWeightsError(CheckpointError):
    """A weight is infinite or NaN. The checkpoint is not published, and earlier ones stay."""


class NoCapacityError(CheckpointError):
    """The memory tier or the local tier has too little capacity for a checkpoint."""


class UnavailableError(CheckpointError):
    """A store is unavailable, which allows no conclusion about its content. `cause` is the cause for counters."""

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class ClaimError(CheckpointError):
    """The right to save checkpoints could not be acquired."""


class ForeignClaimError(ClaimError):
    """Another job or operator uses the checkpoint folder."""


class LaunchError(HoldfastError):
    """The launcher cannot continue."""


class DocumentError(LaunchError):
    """A file or message of the protocol cannot be read."""


class VersionError(DocumentError):
    """This release does not know the version of a document."""


class ControlError(LaunchError):
    """A connection between launchers was refused or broke a rule."""


class AuthenticationError(ControlError):
    """The other side of a connection does not have the job's key."""


class StoreError(LaunchError):
    """The rendezvous store could not be opened."""


class SpawnError(LaunchError):
    """A rank process could not be started."""
