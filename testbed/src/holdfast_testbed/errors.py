"""The errors of the testbed.

TestbedError
├── MissingProgramError     a program is missing; the message names it
├── CommandFailedError      a program failed; has its output
├── NotReadyError           a part did not start in time; has the end of its log
├── AlreadyUpError          a cluster of this name runs
├── NoSuchClusterError      no cluster of this name is recorded
├── NoSuchEventError        the cloud has no such event
├── UnplaceableError        the pods are not placed as a fault requires
└── LeftBehindError         something remained after the removal of a cluster
"""

from __future__ import annotations


class TestbedError(Exception):
    """Base of all errors of the testbed. Its message is meant for users."""

    __test__ = False


class MissingProgramError(TestbedError):
    """A program is missing."""


class CommandFailedError(TestbedError):
    """A program exited with a non-zero status."""


class NotReadyError(TestbedError):
    """A part did not start in time."""


class AlreadyUpError(TestbedError):
    """A cluster of this name runs already."""


class NoSuchClusterError(TestbedError):
    """No cluster of this name is recorded."""


class NoSuchEventError(TestbedError):
    """The cloud has no such event."""


class UnplaceableError(TestbedError):
    """The pods are not placed as a fault requires, so it was not injected."""


class LeftBehindError(TestbedError):
    """Something remained after the removal of a cluster."""
