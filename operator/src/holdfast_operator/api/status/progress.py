"""How far training is, and where it went on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from holdfast_operator.api.ids import AttemptId, parse_pair
from holdfast_operator.api.json import Json, number
from holdfast_operator.api.status.serialization import time_or_none
from holdfast_operator.api.times import format_time, parse_time


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The newest durable commit."""

    step: int
    pair: AttemptId
    tier: str
    time: datetime

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, **self.pair.to_json(), "tier": self.tier, "time": format_time(self.time)}

    @classmethod
    def from_json(cls, value: Json) -> Checkpoint:
        pair, time = parse_pair(value), parse_time(value.get("time"))
        if pair is None or time is None:
            raise ValueError("a checkpoint without pair or time")
        return cls(step=int(value["step"]), pair=pair, tier=str(value.get("tier") or ""), time=time)


@dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """Where training began or, after a suspension, went on. ``after``: the last generation before that."""

    after: int = 0
    pair: AttemptId | None = None
    step: int = 0
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        nobody: Mapping[str, int | None] = {"generation": None, "attempt": None}
        pair = self.pair.to_json() if self.pair else nobody
        return {"after": self.after, **pair, "step": self.step, "message": self.message}

    @classmethod
    def from_json(cls, value: Json) -> StartingPoint:
        return cls(
            after=number(value.get("after")),
            pair=parse_pair(value),
            step=number(value.get("step")),
            message=str(value.get("message") or ""),
        )


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The newest completed step."""

    step: int
    loss: float | None = None
    throughput: float | None = None
    time: datetime | None = None

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "loss": self.loss, "throughput": self.throughput, "time": time_or_none(self.time)}

    @classmethod
    def from_json(cls, value: Json) -> Progress:
        return cls(
            step=number(value.get("step")),
            loss=value.get("loss"),
            throughput=value.get("throughput"),
            time=parse_time(value.get("time")),
        )
