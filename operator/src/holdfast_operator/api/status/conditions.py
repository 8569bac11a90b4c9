"""Conditions, and the problem why workers cannot start."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from holdfast_operator.api.json import Json, number
from holdfast_operator.api.status.json_fields import JsonFields
from holdfast_operator.api.times import format_seconds, parse_time


class ConditionType(StrEnum):
    """The conditions of a job, in the order of the status."""

    SUSPENDED = "Suspended"
    READY = "Ready"
    RESTARTING = "Restarting"
    DEGRADED = "Degraded"
    REPLICAS_DIVERGED = "ReplicasDiverged"
    COMPLETE = "Complete"
    FAILED = "Failed"


MOST_TELLING = (
    ConditionType.FAILED,
    ConditionType.COMPLETE,
    ConditionType.SUSPENDED,
    ConditionType.RESTARTING,
    ConditionType.DEGRADED,
)
"""The first of these that is true summarises the job."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A metav1.Condition."""

    type: str
    status: bool
    reason: str
    message: str
    observed_generation: int
    since: datetime

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of the resource's status."""
        return {
            "type": self.type,
            "status": "True" if self.status else "False",
            "reason": self.reason,
            "message": self.message,
            "observedGeneration": self.observed_generation,
            "lastTransitionTime": format_seconds(self.since),
        }

    @classmethod
    def from_json(cls, value: Json) -> Condition:
        since = parse_time(value.get("lastTransitionTime"))
        if since is None:
            raise ValueError("a condition without time")
        return cls(
            type=str(value["type"]),
            status=value.get("status") == "True",
            reason=str(value.get("reason") or ""),
            message=str(value.get("message") or ""),
            observed_generation=number(value.get("observedGeneration")),
            since=since,
        )


@dataclass(frozen=True, kw_only=True)
class StartupProblem(JsonFields):
    """The problem why workers cannot start, with the reason and message of condition and event."""

    reason: str
    message: str = ""
    since: datetime
