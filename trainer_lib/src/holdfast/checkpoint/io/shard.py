"""One rank's part of a checkpoint that is being saved. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoint.format.shard_layout import ShardPlan
from holdfast.checkpoint.io.fill_progress import FILLED, Filling
from holdfast.checkpoint.io.rate_limit import UNLIMITED, Pace


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The per-rank state, and the share of the tensors: `image`, laid out by the plan.

    A byte of the image is read only after `filling` has reached it. `check` may raise to cancel the write. So may
    `inspect`, which receives every block of the image.
    """

    rank: int
    plan: ShardPlan
    image: memoryview = field(repr=False)
    per_rank: Any = field(repr=False)
    filling: Filling = FILLED
    check: Callable[[], None] = lambda: None
    pace: Pace = UNLIMITED
    inspect: Callable[[memoryview], None] = lambda _: None
