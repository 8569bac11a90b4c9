"""A storage tier, as one rank and its checkpoint manager see it. No torch.

A tier holds checkpoints in addition to the job's folder. Every rank's launcher must offer a tier before any rank uses
it, so all ranks have the same tiers and make the same calls on them.
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
    """The world that a tier is entered for. `check` may raise while a tier waits for a neighbour."""

    settings: TierSettings
    neighbours: frozenset[Neighbour]
    local_rank: int
    exchange: Exchange
    check: Callable[[], None]


class Tier(Protocol):
    """One rank's part of a tier, in one world after the other."""

    name: str
    """As in `core.protocol`, in the launcher's welcome, and in `--<name>-tier`."""
    in_background: bool
    """Whether a thread saves from the staging buffer. Otherwise the tier copies the live objects while training
    waits, and the staged image is empty."""

    def enter(self, world: TierWorld) -> None:
        """Serve this world from now on."""

    def due_at(self, step: int) -> bool:
        """Whether every rank saves this step here."""

    def pace(self) -> Pace:
        """Return the limits of the next save in the background."""

    def save(
        self,
        staged: Staged,
        exchange: Exchange,
        context: FencingContext,
        *,
        check: Callable[[], None] = lambda: None,
        asked: bool = False,
    ) -> SaveResult:
        """Save what is staged; every rank gets the same result. `check` may raise to give up this rank's part.

        `asked`: a worker must leave, so copies on other nodes are made even if none is due.
        """

    def restored(self, name: CheckpointName) -> None:
        """Note that training resumes from this checkpoint."""

    def stores(self, context: FencingContext) -> list[CheckpointStore]:
        """Return the stores to restore from: the one of this node, then those of other nodes."""

    def reported_as(self, url: str) -> str:
        """Return the name under which a restore from this store is reported; empty if the store is not the tier's."""

    def close(self) -> None:
        """Leave the tier: this rank's world does not use it, or the process ends."""
