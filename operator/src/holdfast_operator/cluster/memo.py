"""Read once: what a pure function makes of an object is kept until the object is another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")


class Memo(Generic[S, T]):
    """By key, the last source and what was read from it.

    A source must not be changed after it was read. What vanished is kept until ``clear``. Thread-safe: two threads
    may read the same source twice, and none sees anything else than what its own source says.
    """

    def __init__(self, read: Callable[[S], T]) -> None:
        self._read = read
        self._known: dict[str, tuple[S, T]] = {}

    def __call__(self, key: str, source: S) -> T:
        """Return the value for these arguments, from memory or from the function."""
        known = self._known.get(key)
        if known is not None and known[0] is source:
            return known[1]
        value = self._read(source)
        self._known[key] = (source, value)
        return value

    def clear(self) -> None:
        self._known = {}
