"""Texts and objects in the form that the API server stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast_operator.api import names as c


def shorten(text: str, limit: int = c.MAX_MESSAGE) -> str:
    """Return at most ``limit`` characters from the end, where a traceback has its error."""
    return text if len(text) <= limit else "…" + text[-(limit - 1) :]


def without_nulls(value: Any) -> Any:
    """Return the value without null fields, which the API server drops or rejects."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value
