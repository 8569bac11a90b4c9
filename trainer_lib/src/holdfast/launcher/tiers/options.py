"""What is asked of the memory tier and the local one. Apart from them: most launchers have none, and load neither."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class TierOptions:
    """A folder on a volume of the node, and how often ranks commit there, in steps."""

    root: Path
    limit: int | None = None
    interval: int = 1
    per_second: int | None = None
    """Most bytes that each rank writes there, or sends on from there."""
    in_flight: int | None = None
    """Most writes of each rank at once, or of memory, most reads from one other node."""
    peer_interval: int | None = None
    """How often copies in memory go on to another node, in steps; None: never."""
