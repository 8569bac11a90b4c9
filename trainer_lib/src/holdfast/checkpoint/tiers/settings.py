"""The launcher's settings of a tier that it owns on its node. No torch."""

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
    """A folder of the node. Intervals are in steps. Without a peer interval, no copies are sent to other nodes.

    The settings are sent over the agent socket, which only this user can read.
    """

    folder: Path
    limit: int | None
    interval: int
    per_second: int | None
    me: Neighbour
    key: bytes
    in_flight: int | None = None
    peer_interval: int | None = None

    @classmethod
    def agreed(cls, own: Mapping[str, Any], first: Mapping[str, Any]) -> Self:
        """Parse the own launcher's settings, with the intervals that rank 0's launcher announces.

        Pods from before and after a change of the intervals then act in the same way.
        """
        try:
            return cls.from_json({**own, **first, "me": own["me"]})
        except (KeyError, TypeError, ValueError) as error:
            raise DocumentError(f"not the settings of a tier: {error!r}") from error


def announced(tiers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what other ranks need of this rank's tiers: the address of each, and its interval."""
    shown = ("me", "interval", "peerInterval")
    return {name: {key: settings[key] for key in shown if key in settings} for name, settings in tiers.items()}
