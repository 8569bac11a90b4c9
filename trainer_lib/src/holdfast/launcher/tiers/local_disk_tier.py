"""The local tier as the launcher owns it: a folder on a disk of its node, which outlives ranks and launcher. It is
served: of a replicated state each rank reads what the ranks of all nodes have written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from holdfast.checkpoint.stores.local_disk import LocalStore, own_folders
from holdfast.checkpoint.stores.memory.peer_server import PeerServer
from holdfast.checkpoint.tiers.settings import TierSettings
from holdfast.launcher.status.status_document import Identity
from holdfast.launcher.tiers.options import TierOptions
from holdfast.launcher.tiers.tier_host import TierHost


class LocalHost(TierHost):
    """Owns a folder of the disk."""

    name = "local"
    place = "a disk of the node"

    def __init__(self, options: TierOptions, *, identity: Identity, host: str) -> None:
        super().__init__(options.root, identity=identity, host=host)
        self._options = options

    def describe(self) -> dict[str, Any] | None:
        """What a rank must know, for its welcome."""
        served = self._served()
        if served is None:
            return None
        me, key = served
        options = self._options
        return TierSettings(
            folder=self._folder,
            limit=options.limit,
            interval=options.interval,
            per_second=options.per_second,
            in_flight=options.in_flight,
            me=me,
            key=key,
        ).to_json()

    def _serve(self, folder: Path, host: str | None) -> PeerServer:
        return PeerServer(folder, host=host, store=LocalStore)

    def _forget(self, folder: Path) -> None:
        for own in own_folders(folder):
            shutil.rmtree(own, ignore_errors=True)
