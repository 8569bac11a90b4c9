"""Selects the tiers for the last checkpoint of a worker that must leave."""

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
    """Plans the last checkpoint when a drain begins or its deadline changes, unless the operator drains."""

    def __init__(self, pump: EventPump, node: str, local: LocalRanks, tiers: NodeTiers, uploads: Uploads) -> None:
        self._now = pump.now
        self._node = node
        self._local = local
        self._node_tiers = tiers
        self._uploads = uploads
        self._plan: Plan | None = None  # set while this worker must leave

    @property
    def copies_to_peer(self) -> bool:
        """Whether the last checkpoint is to be copied to another node's memory, even if no copy is due."""
        return self._plan is not None and PEER_TIER in self._plan.tiers

    @property
    def uploaded(self) -> bool:
        """Whether the plan includes the object store, or there is no plan."""
        return self._plan is None or OBJECT_TIER in self._plan.tiers

    def observe(self, before: State, after: State) -> None:
        """Make a plan if there is a new deadline."""
        drain = after.drain
        if drain is None or drain == before.drain or drain.cause is None:
            return
        step = self._local.progress.step_seconds or 0.0
        self._plan = made = plan(
            self._tiers(after), drain.until - self._now(), wait=step, leaving=self._leaving_nodes(after)
        )
        chosen = " and ".join(made.tiers)
        if SHARED_TIER not in made.tiers:
            chosen += f" (and then on {SHARED_TIER}, too late)"
        if made.certain:
            _log.info("the last checkpoint is saved on %s: %s", chosen, made.reason)
        else:
            _log.warning("the last checkpoint is saved on %s, and may be too late: %s", chosen, made.reason)

    def _tiers(self, state: State) -> list[TierEstimate]:
        """Return the tiers in the order in which a last checkpoint fills them."""
        world, speeds = state.world, self._local.speeds
        of_nodes = [] if world is None else self._node_tiers.estimates(speeds, world.members)
        copies = [self._uploads.speed.tier(OBJECT_TIER, source=SHARED_TIER)] if self._uploads.wanted else []
        return [*of_nodes, speeds[SHARED_TIER].tier(SHARED_TIER), *copies]

    def _leaving_nodes(self, state: State) -> frozenset[str]:
        """Return the nodes whose memory will be lost. This worker's memory is lost with its pod."""
        notices = [peer.hello.notice for peer in state.peers.values() if peer.hello and peer.hello.notice]
        return frozenset({self._node, *(notice.node for notice in notices)})
