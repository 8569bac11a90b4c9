"""The operator's waits that integration tests shorten. The defaults are those of every installation."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, kw_only=True)
class Timings:
    """How long the operator waits. Other constants of time are in ``api/names.py``."""

    # The interval between passes without an event, which also write progress.
    look_every: timedelta = timedelta(seconds=5)
    # Until this long after the operator's start, missing reports mean nothing.
    start_grace: timedelta = timedelta(seconds=30)
    # The time for all pods of a gang to be bound after their gates are removed.
    gang_bind: timedelta = timedelta(seconds=60)
    # The interval at which a job that may grow checks the capacity.
    growth_poll: timedelta = timedelta(seconds=30)
    # A start that fails is reported at once and tried again after this time, then after as long as it has failed.
    template_retry: timedelta = timedelta(seconds=20)
    # The time for a scheduler's first response to a pod; shorter than the time for a gang to be bound.
    scheduler_heard: timedelta = timedelta(seconds=30)
    # If a trainer runs for this long and its sidecar detects no launcher, the template has another command.
    launcher_heard: timedelta = timedelta(seconds=15)
    # A launcher has hung if it reported before, and its sidecar has received nothing from it for this long.
    launcher_hung: timedelta = timedelta(seconds=60)
    # A worker is unreachable if its peers lost it and it has not reported for this long. Networks usually recover
    # within this time, and a sidecar that was asked to wait repeats its request.
    cut_off: timedelta = timedelta(seconds=60)
    # Surviving launchers report a failure themselves. The operator records it without them only after this time.
    incident_grace: timedelta = timedelta(seconds=10)
    # The launchers of one world exit within this time. The one whose script raised reports the traceback.
    exits_gather: timedelta = timedelta(seconds=8)
    # The intervals between passes over nodes while one of them is drained, and while one is marked.
    drain_poll: timedelta = timedelta(seconds=2)
    marked_poll: timedelta = timedelta(seconds=20)


DEFAULT_TIMINGS = Timings()
