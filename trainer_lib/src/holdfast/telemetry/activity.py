"""The activity of a rank's main thread: one source for hang detector, accounts and status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Protocol


class Activity(StrEnum):
    """The activities of the main thread. The end of those marked *waiting* depends on another process."""

    STARTUP = "startup"
    RESTORE = "restore"
    SYNC = "sync"  # waiting: forms the groups of a new attempt, sends or receives state
    DATA = "data"
    COMPUTE = "compute"  # the script has a batch: forward, loss, backward
    AVERAGE = "average"  # waiting: averages gradients, or exchanges parts of a sharded model during the computation
    VOTE = "vote"  # waiting
    APPLY = "apply"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    PARKED = "parked"  # waiting: has left an attempt, for its next world
    DONE = "done"

    @property
    def waiting(self) -> bool:
        """Whether its end depends on another process."""
        return self in _WAITING


_WAITING = frozenset({Activity.SYNC, Activity.AVERAGE, Activity.VOTE, Activity.PARKED})


class Listener(Protocol):
    """A receiver of changes.

    It is called on the main thread several times per step, so it must be cheap and never fail.
    """

    def entered(self, activity: Activity, step: int) -> None:
        """The main thread starts this activity, for the step after `step`."""


class Meter:
    """Reports each change to every listener."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = listeners
        self.activity = Activity.STARTUP
        self.step = 0

    def enter(self, activity: Activity, step: int | None = None) -> None:
        """Set the activity of the main thread; without `step`, the step stays the same."""
        if step is not None:
            self.step = step
        self.activity = activity
        for listener in self.listeners:
            listener.entered(activity, self.step)

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Set this activity inside, and the previous one afterwards."""
        before = self.activity
        self.enter(activity)
        try:
            yield
        finally:
            self.enter(before)
