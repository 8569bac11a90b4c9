"""Values of agents' reports, cut to what a status holds and without secrets."""

from __future__ import annotations

import sys
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.ids import AttemptId, parse_pair
from holdfast_operator.api.json import Json, objects
from holdfast_operator.api.redaction import hide_secrets


def whole(value: Any) -> int:
    """Whole seconds, from 0 on."""
    seconds = real(value)
    return 0 if seconds is None else round(min(max(seconds, 0.0), float(c.MAX_NUMBER)))


def of_pairs(value: Any) -> list[Json]:
    """Those that have a pair, the lowest first."""
    found = [(read, item) for item in objects(value) if (read := pair(item)) is not None]
    return [item for _, item in sorted(found, key=lambda both: both[0])]


def pair(value: Any) -> AttemptId | None:
    """A pair; a malformed one if its numbers are larger than all that can be written into the status."""
    found = parse_pair(value)
    if found is None or max(abs(found.generation), abs(found.attempt)) > c.MAX_NUMBER:
        return None
    return found


def real(value: Any) -> float | None:
    """A number that a status can hold: JSON has none that is not finite."""
    exact = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return float(value) if exact else None


def text(value: Any) -> str | None:
    """A message, cut to what a status holds of one."""
    return value[: c.MAX_MESSAGE] if isinstance(value, str) else None


def said(value: Any) -> str:
    """Words of an agent; empty for what is none."""
    return text(value) or ""


def words(value: Any) -> str:
    """A message for people, who are more than those that may read the pod's log."""
    return hide_secrets(said(value))


def name(value: Any) -> str:
    """A name, cut to the longest that there is."""
    return said(value)[: c.MAX_NAME]


def number(value: Any) -> int:
    """Of a label; -1 for what is none."""
    return int(value) if str(value).isdigit() else -1
