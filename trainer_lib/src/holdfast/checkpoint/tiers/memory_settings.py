"""What the launcher says of its memory tier. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint.stores.memory.peer_client import Neighbour
from holdfast.core.errors import DocumentError


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """What the launcher says of the memory that it owns. Intervals are in steps; without one for peers, no copies."""

    folder: Path
    limit: int | None
    interval: int
    peer_interval: int | None
    per_second: int | None
    me: Neighbour
    key: bytes
    in_flight: int | None = None

    def to_json(self) -> dict[str, Any]:
        """As it travels over the agent socket, which only this user can read."""
        return {
            "folder": str(self.folder),
            "limit": self.limit,
            "interval": self.interval,
            "peerInterval": self.peer_interval,
            "perSecond": self.per_second,
            "me": self.me.to_json(),
            "key": self.key.hex(),
            "inFlight": self.in_flight,
        }

    @classmethod
    def from_optional(cls, value: Mapping[str, Any] | None) -> MemorySettings | None:
        """Read what travelled; None where there is no such tier."""
        if not value:
            return None
        try:
            return cls(
                folder=Path(value["folder"]),
                limit=value["limit"],
                interval=int(value["interval"]),
                peer_interval=value["peerInterval"],
                per_second=value["perSecond"],
                me=Neighbour.from_json(value["me"]),
                key=bytes.fromhex(value["key"]),
                in_flight=value.get("inFlight"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DocumentError(f"not a memory tier: {error!r}") from error


def announced(said: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What the other ranks must know of this rank's memory tier: where it is, and how often it commits."""
    return None if not said else {name: said[name] for name in ("me", "interval", "peerInterval")}
