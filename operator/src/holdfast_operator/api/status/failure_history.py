"""What the operator remembers to see that something keeps failing: times of decisions, times of a node's failures."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.json import Json
from holdfast_operator.api.times import format_time, parse_time


@dataclass(frozen=True, kw_only=True)
class ActionHistory:
    """When an action was taken in a scope: a pod by its name, or the whole job (empty)."""

    action: str
    scope: str = ""
    times: tuple[datetime, ...] = ()

    def within(self, now: datetime, seconds: float) -> int:
        """How often within the window that ends now."""
        return sum(1 for time in self.times if (now - time).total_seconds() < seconds)

    def plus(self, now: datetime) -> ActionHistory:
        return replace(self, times=(*self.times, now)[-c.TALLIED_TIMES :])

    def to_json(self) -> dict[str, Any]:
        return {"action": self.action, "scope": self.scope, "times": [format_time(time) for time in self.times]}

    @classmethod
    def from_json(cls, value: Json) -> ActionHistory:
        return cls(action=str(value["action"]), scope=str(value.get("scope") or ""), times=_times(value))


@dataclass(frozen=True, kw_only=True)
class NodeFailures:
    """A node on which the job failed; of the same boot, for a node that booted anew is another one."""

    node: str
    boot_id: str = ""
    times: tuple[datetime, ...] = ()

    def weight(self, now: datetime) -> float:
        """The failures, each of which weighs half as much after each ``OFFENCE_HALVES``."""
        ages = (max(0.0, (now - time) / c.OFFENCE_HALVES) for time in self.times)
        return sum(math.pow(0.5, min(age, 64.0)) for age in ages)

    def plus(self, now: datetime) -> NodeFailures:
        return replace(self, times=(*self.times, now)[-c.OFFENCES_KEPT :])

    def to_json(self) -> dict[str, Any]:
        return {"node": self.node, "bootID": self.boot_id, "times": [format_time(time) for time in self.times]}

    @classmethod
    def from_json(cls, value: Json) -> NodeFailures:
        return cls(node=str(value["node"]), boot_id=str(value.get("bootID") or ""), times=_times(value))


def _times(value: Json) -> tuple[datetime, ...]:
    found = value.get("times")
    return tuple(filter(None, map(parse_time, found))) if isinstance(found, list | tuple) else ()
