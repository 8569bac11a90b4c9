"""What can go wrong in the testbed.

TestbedError
├── MissingProgram     something that has to be installed, named
├── CommandFailed      a program that we ran ended badly; carries what it said
├── NotReady           a part did not come up in time; carries the end of its log
├── AlreadyUp          a cluster of this name runs
├── NoSuchCluster      no cluster of this name is recorded
└── LeftBehind         something survived the removal of a cluster
"""

from __future__ import annotations


class TestbedError(Exception):
    """Base of all errors of the testbed; its message is meant for a person."""

    __test__ = False


class MissingProgram(TestbedError):
    """Something has to be installed first."""


class CommandFailed(TestbedError):
    """A program ended with a non-zero status."""


class NotReady(TestbedError):
    """A part did not come up in time."""


class AlreadyUp(TestbedError):
    """A cluster of this name runs already."""


class NoSuchCluster(TestbedError):
    """No cluster of this name is recorded."""


class LeftBehind(TestbedError):
    """Something survived the removal of a cluster."""
