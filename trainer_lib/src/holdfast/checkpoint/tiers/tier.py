"""A storage tier, from the view of one rank and its checkpoint manager. No torch.

A tier holds checkpoints in addition to the job's folder. A rank uses a tier only if every rank's launcher offers it.
All ranks therefore have the same tiers, and make the same calls on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.io.rate_limit import Pace
from holdfast.checkpoint.policy.fencing_context import FencingContext
from holdfast.checkpoint.ranks.exchange import Exchange
from holdfast.checkpoint.saving.snapshot import SaveResult
from holdfast.checkpoint.saving.stager import Staged
from holdfast.checkpoint.stores.base import CheckpointStore
from holdfast.checkpoint.stores.memory.peer_client import Neighbour
from holdfast.checkpoint.tiers.settings import TierSettings


@dataclass(frozen=True, kw_only=True)
class TierWorld:
    """The world for which a tier is entered. `check` may raise while a tier waits for a neighbour."""

    settings: TierSettings
    neighbours: frozenset[Neighbour]
    local_rank: int
    exchange: Exchange
    check: Callable[[], None]


class Tier(Protocol):
    """One rank's part of a tier, in successive worlds."""

    name: str
    """The name in `core.protocol`, in the launcher's welcome, and in `--<name>-tier`."""
    in_background: bool
    """Whether a thread saves from the staging buffer.

    Otherwise the tier copies the live objects while training is paused, and the staged image is empty.
    """

    def enter(self, world: TierWorld) -> None:
        """Serve this world from now on."""

    def due_at(self, step: int) -> bool:
        """Return whether every rank saves this step here."""

    def pace(self) -> Pace:
        """Return the limits of the next save in the background."""

    def save(
        self,
        staged: Staged,
        exchange: Exchange,
        context: FencingContext,
        *,
        check: Callable[[], None] = lambda: None,
        requested: bool = False,
    ) -> SaveResult:
        """Save what is staged. Every rank returns the same result. `check` may raise to cancel this rank's part.

        `requested`: a worker must leave, so copies on other nodes are created even if none is due.
        """

    def restored(self, name: CheckpointName) -> None:
        """Record that training continues from this checkpoint."""

    def stores(self, context: FencingContext) -> list[CheckpointStore]:
        """Return the stores to restore from: this node's first, and then those of other nodes."""

    def reported_as(self, url: str) -> str:
        """Return the name under which a restore from this store is reported; "" if the store is not the tier's."""

    def close(self) -> None:
        """Leave the tier, because this rank's world does not use it, or the process ends."""
