"""The ID of one attempt to train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, order=True)
class AttemptId:
    """(generation, attempt). Attempt IDs order all worlds of a job."""

    generation: int
    attempt: int

    def to_json(self) -> dict[str, int]:
        return {"generation": self.generation, "attempt": self.attempt}

    def __str__(self) -> str:
        return f"{self.generation}.{self.attempt}"


def parse_attempt_id(value: Any) -> AttemptId | None:
    """Parse an attempt ID of the protocol. Return None for null and for a malformed value."""
    if not isinstance(value, Mapping):
        return None
    generation, attempt = value.get("generation"), value.get("attempt")
    if not isinstance(generation, int) or not isinstance(attempt, int):
        return None
    return AttemptId(generation=generation, attempt=attempt)
