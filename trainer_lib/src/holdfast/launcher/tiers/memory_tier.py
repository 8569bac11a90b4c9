"""The memory tier of a launcher: a folder of slots that outlives its ranks, and the server for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from holdfast.checkpoint.stores.memory.peer_client import Neighbour, successor
from holdfast.checkpoint.stores.memory.peer_server import PeerServer
from holdfast.checkpoint.stores.memory.slot import remove
from holdfast.core.protocol import MEMORY_TIER, PEER_TIER
from holdfast.launcher.drain.last_checkpoint_plan import Speed, TierEstimate
from holdfast.launcher.membership.document import Member
from holdfast.launcher.tiers.tier_host import TierHost


class MemoryHost(TierHost):
    """Owns a folder of the memory volume."""

    name = MEMORY_TIER
    place = "a memory volume"

    def estimates(self, speeds: Mapping[str, Speed], members: Sequence[Member]) -> list[TierEstimate]:
        """Return where a last checkpoint would lie: in local memory and, with copies, on the next node."""
        options, node = self._options, self._identity.node
        memory = speeds[MEMORY_TIER].tier(MEMORY_TIER, node=node, due=options.interval == 1)
        there = self._copy_target(members)
        if there is None:
            return [memory]
        due = options.peer_interval == 1
        return [memory, speeds[PEER_TIER].tier(PEER_TIER, MEMORY_TIER, node=there.node, due=due)]

    def _copy_target(self, members: Iterable[Member]) -> Neighbour | None:
        """Return the neighbour that receives copies, as each rank selects it."""
        if self._options.peer_interval is None:
            return None
        node, pod = self._identity.node, self._identity.pod_uid
        others = [one for one in members if one.pod_uid != pod]
        world = [Neighbour(node=one.node, pod=one.pod_uid, host="", port=0) for one in others]
        return successor(world, Neighbour(node=node, pod=pod, host="", port=0))

    def _serve(self, folder: Path, host: str | None) -> PeerServer:
        return PeerServer(folder, host=host, limit=self._options.limit)

    def _forget(self, folder: Path) -> None:
        for path in folder.glob("*.slot-*"):
            remove(path)
