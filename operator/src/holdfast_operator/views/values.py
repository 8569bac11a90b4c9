"""Values of agents' reports, limited to what a status can hold, and without secrets."""

from __future__ import annotations

import sys
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.ids import AttemptId, parse_attempt_id
from holdfast_operator.api.json import Json, objects
from holdfast_operator.api.redaction import hide_secrets


def whole(value: Any) -> int:
    """Return whole seconds, at least 0."""
    seconds = real(value)
    return 0 if seconds is None else round(min(max(seconds, 0.0), float(c.MAX_NUMBER)))


def with_attempt_ids(value: Any) -> list[Json]:
    """Return the items with an attempt ID, the lowest first."""
    found = [(read, item) for item in objects(value) if (read := attempt_id(item)) is not None]
    return [item for _, item in sorted(found, key=lambda both: both[0])]


def attempt_id(value: Any) -> AttemptId | None:
    """Parse an attempt ID. Numbers that the status cannot hold make it malformed."""
    found = parse_attempt_id(value)
    if found is None or max(abs(found.generation), abs(found.attempt)) > c.MAX_NUMBER:
        return None
    return found


def real(value: Any) -> float | None:
    """Return a finite number, because JSON has no others."""
    exact = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return float(value) if exact else None


def text(value: Any) -> str | None:
    """Return a message, cut to the length that a status holds."""
    return value[: c.MAX_MESSAGE] if isinstance(value, str) else None


def said(value: Any) -> str:
    """Return a text of an agent; empty for any other value."""
    return text(value) or ""


def words(value: Any) -> str:
    """Return a message without secrets, because more users can read the status than the pod's log."""
    return hide_secrets(said(value))


def name(value: Any) -> str:
    """Return a name, cut to the longest valid length."""
    return said(value)[: c.MAX_NAME]


def number(value: Any) -> int:
    """Return the number in a label; -1 for any other value."""
    return int(value) if str(value).isdigit() else -1
