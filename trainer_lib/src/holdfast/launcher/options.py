"""The options of `holdfast run`, as the launcher receives them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """`holdfast run`, parsed and checked."""

    command: tuple[str, ...]
    processes: int
    min_nodes: int
    max_nodes: int
    endpoint: tuple[str, int] | None
    run_id: str
    max_restarts: int
    checkpoint_interval: str
    checkpoint_keep: int
    checkpoint_full_every: int
    checkpoint_delta_threshold: float
    checkpoint_retention: str
    resume: str
    hang_timeout: str
    prefix_output: bool
    warm_processes: int | None = 1
    timeline: Path | None = None
    replica_step: int = 1
    object_url: str = ""
    local_tier: str = ""
    local_interval: int | None = None
    memory_tier: str = ""
    memory_interval: int | None = None
    peer_interval: int | None = None
    nested_launcher: bool = False
