"""The time of day in the words of the contract."""

from __future__ import annotations

from datetime import UTC, datetime


def stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
