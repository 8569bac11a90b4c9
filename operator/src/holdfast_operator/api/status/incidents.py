"""Incidents, and their number."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.json import Json
from holdfast_operator.api.reasons import Cause, DecisionReason, FailureReason
from holdfast_operator.api.status.json_fields import FLAT, JsonFields, stored, written
from holdfast_operator.api.status.serialization import shorten

_REASON = re.compile(r"[^A-Za-z0-9_]")


@dataclass(frozen=True, kw_only=True)
class IncidentCount(JsonFields):
    """Incidents of one cause: the total, and the times of the recent ones."""

    cause: Cause
    total: int = 0
    times: tuple[datetime, ...] = ()

    def within(self, now: datetime, seconds: float) -> tuple[datetime, ...]:
        """Return the times within the window that ends now."""
        return tuple(time for time in self.times if (now - time).total_seconds() < seconds)

    def to_json(self) -> dict[str, Any]:
        """Add the fields that only users read."""
        span = {"windowStartTime": written(self.times[0]), "lastTime": written(self.times[-1])} if self.times else {}
        return {**super().to_json(), "count": len(self.times), **span}

    @classmethod
    def from_json(cls, value: Json) -> IncidentCount:
        found = super().from_json(value)
        return replace(found, total=found.total or len(found.times))


def reason_word(text: str) -> str:
    """Return the text as a reason that the API server accepts."""
    word = _REASON.sub("", text)[:128]
    return word if word and word[0].isalpha() else FailureReason.UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Incident(JsonFields):
    """One failure, from detection to resumption."""

    SPARSE = True

    number: int = stored("number", missing=0)
    attempt_id: AttemptId = stored(FLAT)
    cause: Cause = stored("cause", missing=Cause.INFRASTRUCTURE)
    action: str = stored("action", missing="")
    reason: str = stored("reason", missing=FailureReason.UNKNOWN, read=lambda text: reason_word(str(text)))
    message: str = stored("message", missing="")
    pod: str | None
    rank: int | None
    node: str | None
    detected: datetime = stored("detectedTime")
    resumed: datetime | None = stored("resumedTime", default=None)
    lost_steps: int | None = None
    restored_from: str | None = None
    decision: DecisionReason | None = None
    why: str = ""


def say(text: str) -> str:
    """Return the message, cut to the length that status and events accept."""
    return shorten(text.strip())
