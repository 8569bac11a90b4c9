"""The progress of training, and where it resumed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.status.json_fields import FLAT, JsonFields, stored


@dataclass(frozen=True, kw_only=True)
class Checkpoint(JsonFields):
    """The newest durable checkpoint."""

    step: int
    attempt_id: AttemptId = stored(FLAT)
    tier: str = stored("tier", missing="")
    time: datetime


@dataclass(frozen=True, kw_only=True)
class StartingPoint(JsonFields):
    """Where training started or, after a suspension, resumed. ``after``: the last generation before that."""

    after: int = 0
    attempt_id: AttemptId | None = stored(FLAT, default=None)
    step: int = 0
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Progress(JsonFields):
    """The newest completed step."""

    step: int = stored("step", missing=0)
    loss: float | None = None
    throughput: float | None = None
    time: datetime | None = None
