"""Where the last checkpoint of a worker that must leave goes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.core.protocol import OBJECT_TIER, PEER_TIER, SHARED_TIER
from holdfast.launcher.drain.last_checkpoint_plan import Plan, TierEstimate, plan
from holdfast.launcher.event_pump import EventPump
from holdfast.launcher.membership.state import State
from holdfast.launcher.ranks.event_adapter import LocalRanks
from holdfast.launcher.tiers.upload_client import Uploads

if TYPE_CHECKING:
    from holdfast.launcher.tiers.node_tiers import NodeTiers

_log = logging.getLogger("holdfast.launcher")


class LastCheckpoint:
    """Plans it when a drain begins that is not the operator's wish, and again when its deadline changes."""

    def __init__(self, pump: EventPump, node: str, local: LocalRanks, tiers: NodeTiers, uploads: Uploads) -> None:
        self._now = pump.now
        self._node = node
        self._local = local
        self._near = tiers
        self._uploads = uploads
        self._plan: Plan | None = None  # while this worker leaves because it must

    @property
    def near(self) -> bool:
        """Whether the last commit is to lie on another node's memory, due there or not."""
        return self._plan is not None and PEER_TIER in self._plan.tiers

    @property
    def uploaded(self) -> bool:
        """Whether the object store is one of its places, or nothing is planned."""
        return self._plan is None or OBJECT_TIER in self._plan.tiers

    def observe(self, before: State, after: State) -> None:
        """Choose its places when there is a new deadline."""
        drain = after.drain
        if drain is None or drain == before.drain or drain.cause is None:
            return
        step = self._local.progress.step_seconds or 0.0
        self._plan = made = plan(self._tiers(after), drain.until - self._now(), wait=step, going=self._going(after))
        chosen = " and ".join(made.tiers)
        if SHARED_TIER not in made.tiers:
            chosen += f" (and then to {SHARED_TIER}, though late)"
        if made.certain:
            _log.info("the last commit goes to %s: %s", chosen, made.reason)
        else:
            _log.warning("the last commit may come too late, and is tried to %s: %s", chosen, made.reason)

    def _tiers(self, state: State) -> list[TierEstimate]:
        """In the order in which a last commit fills them."""
        world, speeds = state.world, self._local.speeds
        near = [] if world is None else self._near.estimates(speeds, world.members)
        copies = [self._uploads.speed.tier(OBJECT_TIER, source=SHARED_TIER)] if self._uploads.wanted else []
        return [*near, speeds[SHARED_TIER].tier(SHARED_TIER), *copies]

    def _going(self, state: State) -> frozenset[str]:
        """The nodes whose memory is lost: this worker's goes with its pod, if not with the whole node."""
        said = [peer.hello.notice for peer in state.peers.values() if peer.hello and peer.hello.notice]
        return frozenset({self._node, *(notice.node for notice in said)})
