"""Caches the result of a pure function for an object until the object changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")


class Memo(Generic[S, T]):
    """The last source and its result, by key.

    A source must not be modified after it was read. Entries of vanished objects stay until ``clear``. Thread-safe:
    two threads may read one source twice, but each gets the result of its own source.
    """

    def __init__(self, read: Callable[[S], T]) -> None:
        self._read = read
        self._known: dict[str, tuple[S, T]] = {}

    def __call__(self, key: str, source: S) -> T:
        """Return the remembered result for this source, or compute it."""
        known = self._known.get(key)
        if known is not None and known[0] is source:
            return known[1]
        value = self._read(source)
        self._known[key] = (source, value)
        return value

    def clear(self) -> None:
        self._known = {}
