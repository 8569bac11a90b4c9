"""What the launcher says of a tier that it owns on its node. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from holdfast.checkpoint.stores.memory.peer_client import Neighbour
from holdfast.core.errors import DocumentError
from holdfast.core.json_fields import JsonFields


@dataclass(frozen=True, kw_only=True)
class TierSettings(JsonFields):
    """A folder of the node's. The interval is in steps. They travel over the agent socket, which only this user can
    read."""

    folder: Path
    limit: int | None
    interval: int
    per_second: int | None
    me: Neighbour
    key: bytes
    in_flight: int | None = None

    @classmethod
    def from_optional(cls, value: Mapping[str, Any] | None) -> Self | None:
        """Read what travelled; None where there is no such tier."""
        if not value:
            return None
        try:
            return cls.from_json(value)
        except (KeyError, TypeError, ValueError) as error:
            raise DocumentError(f"not the settings of a tier: {error!r}") from error


@dataclass(frozen=True, kw_only=True)
class MemorySettings(TierSettings):
    """Settings of the memory tier. Without an interval for peers, no copies are made."""

    peer_interval: int | None


def announced(said: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What the other ranks must know of this rank's tier: where it is served, and how often it saves."""
    return {name: said[name] for name in ("me", "interval", "peerInterval") if name in said} if said else None
