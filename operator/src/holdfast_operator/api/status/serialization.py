"""Texts and objects as the API server keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast_operator.api import names as c


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
