"""Shares equal values, because the pods of a job differ in little but their names.

Callers must not modify a shared value.
"""

from __future__ import annotations

from sys import intern
from typing import Any

# Longer strings, such as a message or a log, rarely occur twice.
_LONGEST = 64
_MOST_PARTS = 1 << 15


def compact(value: Any) -> Any:
    """Return an equal JSON value whose short strings, above all its keys, are shared."""
    if type(value) is str:
        return intern(value) if len(value) <= _LONGEST else value
    if type(value) is dict:
        return {compact(key): compact(item) for key, item in value.items()}
    if type(value) is list:
        return [*map(compact, value)]
    return value


class Interner:
    """Shares equal parts of objects.

    Thread-safe: at worst, two threads keep one copy each. The table is cleared when it is full; shared values stay
    shared.
    """

    def __init__(self, most: int = _MOST_PARTS) -> None:
        self._most = most
        self._known: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        """Return the object that represents all equal values."""
        # The key is the serialized form, because 1, 1.0 and true are equal but not the same.
        written = repr(value)
        found = self._known.get(hash(written))
        if found is not None and repr(found) == written:
            return found
        if len(self._known) >= self._most:
            self._known = {}
        kept = self._known[hash(written)] = compact(value)
        return kept
