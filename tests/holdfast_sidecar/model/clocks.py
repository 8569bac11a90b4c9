"""Waiting for what takes real time, and a clock for what does not."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

GOLDEN = Path(__file__).parents[2] / "contract"
DEADLINE = 240.0
"""Only what fails takes so long."""

Document = dict[str, Any]
Got = TypeVar("Got")


def wait_until(condition: Callable[[], Got], what: str, *, deadline: float = DEADLINE) -> Got:
    """The condition's first true value."""
    end = time.monotonic() + deadline
    while not (value := condition()):
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.01)
    return value


def golden(name: str) -> Document:
    document: Document = json.loads((GOLDEN / name).read_text())
    return document


class FakeClock:
    """Time that moves when a test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.start = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)

    def now(self) -> dt.datetime:
        return self.start + dt.timedelta(seconds=self.seconds - 1000.0)

    def monotonic(self) -> float:
        return self.seconds

    def forward(self, seconds: float) -> None:
        self.seconds += seconds
