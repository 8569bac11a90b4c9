"""The local disk tier of a launcher: a folder on a disk of its node that outlives ranks and launcher.

The launcher serves it: of a replicated state, each rank reads what the ranks of all nodes have written.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from holdfast.checkpoint.stores.local_disk import LocalStore, own_folders
from holdfast.checkpoint.stores.memory.peer_server import PeerServer
from holdfast.core.protocol import LOCAL_TIER
from holdfast.launcher.tiers.tier_host import TierHost


class LocalHost(TierHost):
    """Owns a folder of the disk."""

    name = LOCAL_TIER
    place = "a disk of the node"

    def _serve(self, folder: Path, host: str | None) -> PeerServer:
        return PeerServer(folder, host=host, store=LocalStore)

    def _forget(self, folder: Path) -> None:
        for own in own_folders(folder):
            shutil.rmtree(own, ignore_errors=True)
