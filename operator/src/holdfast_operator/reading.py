"""Reading a spec: each function returns the value or raises ``UnreadableError`` with the path of what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast_operator.errors import UnreadableError

Json = Mapping[str, Any]


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


def integer(value: Json, key: str, path: str, default: int | None = None, *, minimum: int) -> int:
    """A whole number of at least ``minimum``."""
    found = value.get(key, default)
    if not isinstance(found, int) or isinstance(found, bool) or found < minimum:
        raise UnreadableError(f"{path}.{key} must be a whole number of at least {minimum}, not {found!r}")
    return found


def choice(value: Json, key: str, path: str, known: tuple[str, ...], default: str | None) -> str:
    """One of the words that are known."""
    found = value.get(key, default)
    if found not in known:
        raise UnreadableError(f"{path}.{key} must be one of {', '.join(known)}, not {found!r}")
    return str(found)
