"""The time of day in the format of the protocol."""

from __future__ import annotations

from datetime import UTC, datetime


def stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
