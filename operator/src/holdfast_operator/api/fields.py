"""Reading what others wrote: specs, field by field (``UnreadableError`` with the path of what is wrong), and JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from holdfast_operator.errors import UnreadableError

Json = Mapping[str, Any]

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def loads(raw: bytes) -> Any:
    """JSON whose every value the API server keeps as it is; raises ``ValueError`` for what is none.

    NaN and infinities are null. Half a surrogate pair would be kept as another letter, differ from what is wanted at
    each pass, and so be written for ever.
    """
    try:
        found = json.loads(raw, parse_constant=lambda _name: None)
        if _SURROGATE.search(raw) is None:
            return found
        return json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
    except RecursionError as error:
        raise ValueError("too deeply nested") from error


def mapping(value: Any, path: str) -> Json:
    """An object."""
    if not isinstance(value, Mapping):
        raise UnreadableError(f"{path} is missing or no object")
    return value


def items(value: Any, path: str) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        raise UnreadableError(f"{path} is missing or no list")
    return value


def integer(
    value: Json, key: str, path: str, default: int | None = None, *, minimum: int, maximum: int | None = None
) -> int:
    """A whole number of at least ``minimum``, and at most ``maximum``."""
    found = value.get(key, default)
    whole = isinstance(found, int) and not isinstance(found, bool)
    if not whole or found < minimum or (maximum is not None and found > maximum):
        bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise UnreadableError(f"{path}.{key} must be a whole number {bounds}, not {found!r}")
    return int(found)


def number(value: Json, key: str, path: str, default: float, *, maximum: float) -> float:
    """A number from 0 to ``maximum``."""
    found = value.get(key, default)
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found <= maximum:
        raise UnreadableError(f"{path}.{key} must be a number from 0 to {maximum:g}, not {found!r}")
    return float(found)


def choice(value: Json, key: str, path: str, known: tuple[str, ...], default: str | None) -> str:
    """One of the words that are known."""
    found = value.get(key, default)
    if found not in known:
        raise UnreadableError(f"{path}.{key} must be one of {', '.join(known)}, not {found!r}")
    return str(found)
