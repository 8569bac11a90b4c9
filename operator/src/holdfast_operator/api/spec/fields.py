"""Strict readers for a spec: a wrong field raises ``UnreadableError`` with its path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast_operator.api.json import Json
from holdfast_operator.api.quantities import whole
from holdfast_operator.errors import UnreadableError


def mapping(value: Any, path: str) -> Json:
    """Return an object. Raises ``UnreadableError``."""
    if not isinstance(value, Mapping):
        raise UnreadableError(f"{path} is missing or no object")
    return value


def items(value: Any, path: str) -> list[Any]:
    """Return a list. Raises ``UnreadableError``."""
    if not isinstance(value, list):
        raise UnreadableError(f"{path} is missing or no list")
    return value


def integer(value: Json, key: str, path: str, default: int | None = None, *, minimum: int) -> int:
    """Return an integer of at least ``minimum``. Raises ``UnreadableError``."""
    found = value.get(key, default)
    whole = isinstance(found, int) and not isinstance(found, bool)
    if not whole or found < minimum:
        raise UnreadableError(f"{path}.{key} must be an integer of at least {minimum}, not {found!r}")
    return int(found)


def number(value: Json, key: str, path: str, default: float, *, maximum: float) -> float:
    """Return a number from 0 to ``maximum``. Raises ``UnreadableError``."""
    found = value.get(key, default)
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found <= maximum:
        raise UnreadableError(f"{path}.{key} must be a number from 0 to {maximum:g}, not {found!r}")
    return float(found)


def size(value: Json, key: str, path: str) -> int | None:
    """Return a positive quantity in bytes, or None if the field is absent. Raises ``UnreadableError``."""
    found = value.get(key)
    if found is not None and not whole(found):
        raise UnreadableError(f"{path}.{key} must be a quantity above 0, for example 100Mi, not {found!r}")
    return None if found is None else whole(found)


def choice(value: Json, key: str, path: str, known: tuple[str, ...], default: str | None) -> str:
    """Return one of the known values. Raises ``UnreadableError``."""
    found = value.get(key, default)
    if found not in known:
        raise UnreadableError(f"{path}.{key} must be one of {', '.join(known)}, not {found!r}")
    return str(found)


def optional_integer(value: Json, key: str, path: str, *, minimum: int) -> int | None:
    """Return an integer, or None if the field is absent. Raises ``UnreadableError``."""
    return None if value.get(key) is None else integer(value, key, path, minimum=minimum)
