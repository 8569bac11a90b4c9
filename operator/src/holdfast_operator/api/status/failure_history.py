"""What the operator remembers to see that something keeps failing: times of decisions, times of a node's failures."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime

from holdfast_operator.api import names as c
from holdfast_operator.api.status.json_fields import JsonFields, stored


@dataclass(frozen=True, kw_only=True)
class ActionHistory(JsonFields):
    """When an action was taken in a scope: a pod by its name, or the whole job (empty)."""

    action: str
    scope: str = ""
    times: tuple[datetime, ...] = ()

    def within(self, now: datetime, seconds: float) -> int:
        """How often within the window that ends now."""
        return sum(1 for time in self.times if (now - time).total_seconds() < seconds)

    def plus(self, now: datetime) -> ActionHistory:
        return replace(self, times=(*self.times, now)[-c.TALLIED_TIMES :])


@dataclass(frozen=True, kw_only=True)
class NodeFailures(JsonFields):
    """A node on which the job failed; of the same boot, for a node that booted anew is another one."""

    node: str
    boot_id: str = stored("bootID", default="")
    times: tuple[datetime, ...] = ()

    def weight(self, now: datetime) -> float:
        """The failures, each of which weighs half as much after each ``OFFENCE_HALVES``."""
        ages = (max(0.0, (now - time) / c.OFFENCE_HALVES) for time in self.times)
        return sum(math.pow(0.5, min(age, 64.0)) for age in ages)

    def plus(self, now: datetime) -> NodeFailures:
        return replace(self, times=(*self.times, now)[-c.OFFENCES_KEPT :])
