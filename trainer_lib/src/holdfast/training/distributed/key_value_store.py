"""The operations of the attempt's TCPStore that Holdfast's own protocols use. Does not import torch."""

from __future__ import annotations

from typing import Protocol


class KeyValueStore(Protocol):
    """A client of the store that all ranks of an attempt share."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes:
        """Return the value of a key. Wait until a rank has written it."""

    def check(self, keys: list[str], /) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write a key that does not exist, if `expected` is ''. Return its value after that."""

    def delete_key(self, key: str, /) -> bool: ...
