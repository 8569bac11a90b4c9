"""Connections between launchers: this host's address, proofs of a key, and a limit of unauthenticated connections.

Any host may open connections and send nothing. If the limit is reached, the oldest connection of the address with the
most connections is dropped. No address can therefore block the others. Addresses of members are dropped last.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
from collections import Counter
from collections.abc import Collection, Hashable
from typing import Final, Generic, TypeVar

MOST_GREETINGS: Final = 64
K = TypeVar("K", bound=Hashable)


def own_address(host: str, port: int) -> str:
    """Return the address that this host uses to reach another host. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def derived_key(key: bytes, use: str) -> bytes:
    """Return a key for one use, which does not reveal the first key."""
    return hmac.new(key, use.encode(), hashlib.sha256).digest()


def proof(key: bytes, *parts: str) -> str:
    """Return a proof over these parts, which only a holder of the key can compute."""
    return hmac.new(key, "\n".join(parts).encode(), hashlib.sha256).hexdigest()


def is_proof(given: str, key: bytes, *parts: str) -> bool:
    """Return whether a text from the other side is the proof over these parts."""
    return hmac.compare_digest(given.encode(errors="replace"), proof(key, *parts).encode())


class PendingHandshakes(Generic[K]):
    """Unauthenticated connections by their key, oldest first, each with its source address."""

    def __init__(self, most: int = MOST_GREETINGS) -> None:
        self._most = most
        self._hosts: dict[K, str] = {}

    def begin(self, key: K, host: str, *, members: Collection[str] = ()) -> K | None:
        """Add a connection.

        Return the connection to drop for it, which is no longer counted; None if there is none.
        """
        dropped = self._to_drop(members) if len(self._hosts) >= self._most else None
        if dropped is not None:
            del self._hosts[dropped]
        self._hosts[key] = host
        return dropped

    def end(self, key: K) -> None:
        """Remove a connection that was authenticated, refused or dropped."""
        self._hosts.pop(key, None)

    def _to_drop(self, members: Collection[str]) -> K:
        held = Counter(self._hosts.values())
        worst = max(held, key=lambda host: (host not in members, held[host]))
        return next(key for key, host in self._hosts.items() if host == worst)
