"""Reading and writing lists and optional parts: what cannot be read is left out, and its neighbours stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar

from holdfast_operator.api import names as c
from holdfast_operator.api.json import Json, items
from holdfast_operator.api.times import format_time

T = TypeVar("T")


def time_or_none(value: datetime | None) -> str | None:
    return format_time(value) if value else None


def optional(value: Any, read: Callable[[Json], T]) -> T | None:
    """What can be read, or None."""
    found = each([value], read)
    return found[0] if found else None


def each(values: Any, read: Callable[[Json], T]) -> tuple[T, ...]:
    """Return the entries that can be parsed."""
    found = []
    for value in items(values):
        try:
            found.append(read(value))
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    return tuple(found)


def shorten(text: str, limit: int = c.MAX_MESSAGE) -> str:
    """At most ``limit`` characters, the end kept: the last lines of a traceback say most."""
    return text if len(text) <= limit else "…" + text[-(limit - 1) :]


def without_nulls(value: Any) -> Any:
    """The same without null fields: the API server drops them or refuses them."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value
