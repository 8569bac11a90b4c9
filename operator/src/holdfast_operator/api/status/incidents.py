"""What failed, and how often."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from holdfast_operator.api.ids import AttemptId, parse_pair
from holdfast_operator.api.json import Json, integer, items, number
from holdfast_operator.api.reasons import Cause, DecisionReason, FailureReason, cause_of, decision_reason
from holdfast_operator.api.status.serialization import shorten, time_or_none
from holdfast_operator.api.times import format_time, parse_time

_REASON = re.compile(r"[^A-Za-z0-9_]")


@dataclass(frozen=True, kw_only=True)
class IncidentCount:
    """Incidents of one cause: since ever and the times of those within the window."""

    cause: Cause
    total: int = 0
    times: tuple[datetime, ...] = ()

    def within(self, now: datetime, seconds: float) -> tuple[datetime, ...]:
        """Those that still count."""
        return tuple(time for time in self.times if (now - time).total_seconds() < seconds)

    def to_json(self) -> dict[str, Any]:
        """As in the resource's status."""
        return {
            "cause": self.cause,
            "count": len(self.times),
            "total": self.total,
            "windowStartTime": time_or_none(self.times[0]) if self.times else None,
            "lastTime": time_or_none(self.times[-1]) if self.times else None,
            "times": [format_time(time) for time in self.times],
        }

    @classmethod
    def from_json(cls, value: Json) -> IncidentCount:
        times = tuple(filter(None, map(parse_time, items(value.get("times")))))
        return cls(cause=Cause(value["cause"]), total=int(value.get("total") or len(times)), times=times)


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One failure, from detection to resumption."""

    number: int
    pair: AttemptId
    cause: Cause
    action: str
    reason: str
    message: str
    pod: str | None
    rank: int | None
    node: str | None
    detected: datetime
    resumed: datetime | None = None
    lost_steps: int | None = None
    restored_from: str | None = None
    decision: DecisionReason | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """As in the resource's status."""
        return {
            "number": self.number,
            **self.pair.to_json(),
            "cause": self.cause,
            "action": self.action,
            "reason": self.reason,
            "message": self.message,
            "pod": self.pod,
            "rank": self.rank,
            "node": self.node,
            "detectedTime": format_time(self.detected),
            "resumedTime": time_or_none(self.resumed),
            "lostSteps": self.lost_steps,
            "restoredFrom": self.restored_from,
            "decision": self.decision,
            "why": self.why or None,
        }

    @classmethod
    def from_json(cls, value: Json) -> Incident:
        detected = parse_time(value.get("detectedTime"))
        pair = parse_pair(value)
        if detected is None or pair is None:
            raise ValueError("an incident without time or pair")
        return cls(
            number=number(value.get("number")),
            pair=pair,
            cause=cause_of(value.get("cause")) or Cause.INFRASTRUCTURE,
            action=str(value.get("action") or ""),
            reason=reason_word(str(value.get("reason") or FailureReason.UNKNOWN)),
            message=str(value.get("message") or ""),
            pod=value.get("pod"),
            rank=integer(value.get("rank")),
            node=value.get("node"),
            detected=detected,
            resumed=parse_time(value.get("resumedTime")),
            lost_steps=integer(value.get("lostSteps")),
            restored_from=value.get("restoredFrom"),
            decision=decision_reason(str(value.get("decision"))),
            why=str(value.get("why") or ""),
        )


def reason_word(text: str) -> str:
    """A reason that the API server accepts."""
    word = _REASON.sub("", text)[:128]
    return word if word and word[0].isalpha() else FailureReason.UNKNOWN


def say(text: str) -> str:
    """A message that fits everywhere it is shown."""
    return shorten(text.strip())
