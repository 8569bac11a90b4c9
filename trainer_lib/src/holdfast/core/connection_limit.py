"""Connections that have not proved themselves yet: few at once, and who holds most of them makes way for the others.

A stranger may open as many as it likes and send nothing. If all places are taken, the oldest connection of the
address that holds most is dropped, so that no address can keep the others out; members' addresses come last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable
from typing import Final, Generic, TypeVar

MOST_GREETINGS: Final = 64
K = TypeVar("K", bound=Hashable)


class Greetings(Generic[K]):
    """Connections by their key, oldest first, each with the address that it came from."""

    def __init__(self, most: int = MOST_GREETINGS) -> None:
        self._most = most
        self._hosts: dict[K, str] = {}

    def begin(self, key: K, host: str, *, members: Collection[str] = ()) -> K | None:
        """Add a connection; return the one to drop for it, if any. It is no longer counted."""
        dropped = self._to_drop(members) if len(self._hosts) >= self._most else None
        if dropped is not None:
            del self._hosts[dropped]
        self._hosts[key] = host
        return dropped

    def end(self, key: K) -> None:
        """Forget a connection: it has proved itself, was refused or was dropped."""
        self._hosts.pop(key, None)

    def _to_drop(self, members: Collection[str]) -> K:
        held = Counter(self._hosts.values())
        worst = max(held, key=lambda host: (host not in members, held[host]))
        return next(key for key, host in self._hosts.items() if host == worst)
