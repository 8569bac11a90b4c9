"""The history by which the operator detects repeated failures: times of decisions and of a node's failures."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime

from holdfast_operator.api import names as c
from holdfast_operator.api.status.json_fields import JsonFields, stored


@dataclass(frozen=True, kw_only=True)
class ActionHistory(JsonFields):
    """The times when an action was taken in a scope: a pod by its name, or the whole job (empty)."""

    action: str
    scope: str = ""
    times: tuple[datetime, ...] = ()

    def within(self, now: datetime, seconds: float) -> int:
        """Return how often the action was taken within the window that ends now."""
        return sum(1 for time in self.times if (now - time).total_seconds() < seconds)

    def plus(self, now: datetime) -> ActionHistory:
        return replace(self, times=(*self.times, now)[-c.TALLIED_TIMES :])


@dataclass(frozen=True, kw_only=True)
class Divergence(JsonFields):
    """A comparison of all replicas in which the state of one rank differed from that of most others."""

    rank: int
    node: str = ""
    step: int
    tensor: str = ""  # the first one that differed
    repaired: bool = False  # false: no state had a majority, so no rank is known to be wrong
    time: datetime


@dataclass(frozen=True, kw_only=True)
class Divergences(JsonFields):
    """How often a rank differed. A comparison without a majority counts as one rank."""

    count: int = 0
    last: Divergence


@dataclass(frozen=True, kw_only=True)
class NodeFailures(JsonFields):
    """The failures of the job on a node since one boot. A node that rebooted counts as another node."""

    SPARSE = True

    node: str
    boot_id: str = stored("bootID", default="")
    times: tuple[datetime, ...] = ()
    step: int | None = None  # of the last divergence; all ranks that differ after one step count once

    def weight(self, now: datetime) -> float:
        """Return the sum of the failures' weights, each of which halves after each ``OFFENCE_HALVES``."""
        ages = (max(0.0, (now - time) / c.OFFENCE_HALVES) for time in self.times)
        return sum(math.pow(0.5, min(age, 64.0)) for age in ages)

    def plus(self, now: datetime) -> NodeFailures:
        return replace(self, times=(*self.times, now)[-c.OFFENCES_KEPT :])
