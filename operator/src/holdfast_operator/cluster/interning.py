"""Equal values once. A fleet's objects say the same things: a job's ten pods differ in little but their names.

Whoever takes a value from here must not change it: it is in other objects as well.
"""

from __future__ import annotations

from sys import intern
from typing import Any

# What is longer, such as a message or a log, hardly comes twice.
_LONGEST = 64
_MOST_PARTS = 1 << 15


def compact(value: Any) -> Any:
    """An equal value of JSON whose short strings, its keys above all, are in memory once."""
    if type(value) is str:
        return intern(value) if len(value) <= _LONGEST else value
    if type(value) is dict:
        return {compact(key): compact(item) for key, item in value.items()}
    if type(value) is list:
        return [*map(compact, value)]
    return value


class Interner:
    """Equal parts of objects once. Thread-safe: at worst two threads keep one each.

    It holds what it has seen until that are too many, and then begins anew; what was shared by then stays so.
    """

    def __init__(self, most: int = _MOST_PARTS) -> None:
        self._most = most
        self._known: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        """An equal value, the same object as for the last one that was equal."""
        # By what is written: 1, 1.0 and true are equal, and not the same.
        written = repr(value)
        found = self._known.get(hash(written))
        if found is not None and repr(found) == written:
            return found
        if len(self._known) >= self._most:
            self._known = {}
        kept = self._known[hash(written)] = compact(value)
        return kept
