"""What a rank's main thread is doing as it changes: one source for hang detector, accounts and status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Protocol


class Activity(StrEnum):
    """What the main thread does. Of those marked *waiting*, another process decides when they end."""

    STARTUP = "startup"
    RESTORE = "restore"
    SYNC = "sync"  # waiting: forms the groups of a new attempt, gives or gets state
    DATA = "data"
    COMPUTE = "compute"  # the script has a batch: forward, loss, backward
    AVERAGE = "average"  # waiting: gradients on their way, or parts of a sharded model in the middle of computing
    VOTE = "vote"  # waiting
    APPLY = "apply"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    PARKED = "parked"  # waiting: has left an attempt, for its next world
    DONE = "done"

    @property
    def waiting(self) -> bool:
        """Whether its end is in other hands."""
        return self in _WAITING


_WAITING = frozenset({Activity.SYNC, Activity.AVERAGE, Activity.VOTE, Activity.PARKED})


class Listener(Protocol):
    """Who wants to know at once; called on the main thread, several times a step: it must be cheap and never fail."""

    def entered(self, activity: Activity, step: int) -> None:
        """From now on the main thread does this, working towards the step after `step`."""


class Meter:
    """Tells every listener of each change."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners
        self.activity = Activity.STARTUP
        self.step = 0

    def enter(self, activity: Activity, step: int | None = None) -> None:
        """The main thread does this now; without `step`, at the step it was at."""
        if step is not None:
            self.step = step
        self.activity = activity
        for listener in self._listeners:
            listener.entered(activity, self.step)

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Do this, then what was done before."""
        before = self.activity
        self.enter(activity)
        try:
            yield
        finally:
            self.enter(before)
