"""The options of the memory tier and the local disk tier. A separate module: most launchers import neither tier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class TierOptions:
    """A folder on a volume of the node, and how often ranks write checkpoints there, in steps."""

    root: Path
    limit: int | None = None
    interval: int = 1
    per_second: int | None = None
    """Maximum number of bytes that each rank writes there, or sends on from there."""
    in_flight: int | None = None
    """Maximum number of concurrent writes of each rank; for memory, of concurrent reads from one other node."""
    peer_interval: int | None = None
    """Interval of copies from memory to another node, in steps; None: never."""
