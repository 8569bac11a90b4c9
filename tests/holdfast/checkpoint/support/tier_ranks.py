"""Ranks that save on one tier without a manager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.io.staging_buffer import Arena
from holdfast.checkpoint.policy.fencing_context import FencingContext
from holdfast.checkpoint.saving.planner import Planner
from holdfast.checkpoint.saving.snapshot import SaveResult, Snapshot
from holdfast.checkpoint.saving.stager import plan
from holdfast.checkpoint.stores.base import CheckpointStore
from holdfast.checkpoint.stores.memory.peer_client import Neighbour
from holdfast.checkpoint.tiers.settings import TierSettings
from holdfast.checkpoint.tiers.tier import Tier, TierWorld


def no_check() -> None:
    """Never end the attempt."""


class TierRank:
    """The part of one rank in a tier, entered for one world."""

    def __init__(
        self,
        tier: Tier,
        settings: TierSettings,
        exchange: Any,
        *,
        neighbours: frozenset[Neighbour] = frozenset(),
        local_rank: int = 0,
        check: Callable[[], None] = no_check,
    ) -> None:
        self.tier: Tier = tier
        self._exchange = exchange
        self._planner = Planner()
        self._arena = Arena() if tier.in_background else None
        tier.enter(
            TierWorld(settings=settings, neighbours=neighbours, local_rank=local_rank, exchange=exchange, check=check)
        )

    def save(self, snapshot: Snapshot, context: FencingContext, *, requested: bool = False) -> SaveResult:
        rank, size = self._exchange.rank, self._exchange.size
        staged = plan(snapshot, self._arena, self._planner, rank=rank, size=size)
        if self._arena is not None:
            staged.copy()
        return self.tier.save(staged, self._exchange, context, requested=requested)

    def due_at(self, step: int) -> bool:
        return self.tier.due_at(step)

    def restored(self, name: CheckpointName) -> None:
        self.tier.restored(name)

    def stores(self, context: FencingContext) -> list[CheckpointStore]:
        return self.tier.stores(context)

    def close(self) -> None:
        self.tier.close()
