"""Lenient readers of JSON from other programs: each returns a value of its type for any input."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from holdfast_operator.api import names as c

Json = Mapping[str, Any]
EMPTY: Json = {}

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def loads(raw: bytes) -> Any:
    """Parse JSON whose every value the API server keeps unchanged. Raises ``ValueError`` for malformed JSON.

    NaN and infinities become null. Half a surrogate pair is replaced: the API server would store another character,
    so the stored value would differ from the requested one and be written in each pass.
    """
    try:
        found = json.loads(raw, parse_constant=lambda _name: None)
        if _SURROGATE.search(raw) is None:
            return found
        return json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
    except RecursionError as error:
        raise ValueError("too deeply nested") from error


def part(value: Json, key: str) -> Json:
    """Return an object within another; an empty one for anything else."""
    found = value.get(key)
    return found if isinstance(found, Mapping) else EMPTY


def items(value: Any) -> list[Any]:
    """Return a list; an empty one for anything else."""
    return list(value) if isinstance(value, list | tuple) else []


def objects(value: Any) -> list[Json]:
    """Return the objects in a list."""
    return [item for item in items(value) if isinstance(item, Mapping)]


def integer(value: Any) -> int | None:
    """Return an integer that a status can hold; None for anything else."""
    return value if _whole(value) and abs(value) <= c.MAX_NUMBER else None


def number(value: Any, default: int = 0) -> int:
    """Return an integer, limited to what a status can hold; the default for anything else."""
    return min(max(value, -c.MAX_NUMBER), c.MAX_NUMBER) if _whole(value) else default


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
