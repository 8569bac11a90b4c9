"""What can go wrong in the testbed.

TestbedError
├── MissingProgramError     something that has to be installed, named
├── CommandFailedError      a program that we ran ended badly; carries what it said
├── NotReadyError           a part did not come up in time; carries the end of its log
├── AlreadyUpError          a cluster of this name runs
├── NoSuchClusterError      no cluster of this name is recorded
├── NoSuchEventError        the cloud announces no such thing
└── LeftBehindError         something survived the removal of a cluster
"""

from __future__ import annotations


class TestbedError(Exception):
    """Base of all errors of the testbed; its message is meant for a person."""

    __test__ = False


class MissingProgramError(TestbedError):
    """Something has to be installed first."""


class CommandFailedError(TestbedError):
    """A program ended with a non-zero status."""


class NotReadyError(TestbedError):
    """A part did not come up in time."""


class AlreadyUpError(TestbedError):
    """A cluster of this name runs already."""


class NoSuchClusterError(TestbedError):
    """No cluster of this name is recorded."""


class NoSuchEventError(TestbedError):
    """The cloud announces no such thing."""


class UnplaceableError(TestbedError):
    """The pods do not stand where a fault is to hit them, so it was not tried."""


class LeftBehindError(TestbedError):
    """Something survived the removal of a cluster."""
