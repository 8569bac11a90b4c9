"""The local tier as the launcher owns it: a folder on a disk of its node, which outlives ranks and launcher, and
who serves it: of a replicated state each rank reads what the ranks of all nodes have written."""

from __future__ import annotations

import logging
import os
import shutil
from typing import Any

from holdfast.checkpoint.local import LocalSettings
from holdfast.checkpoint.stores.local import LocalStore, own_folders
from holdfast.checkpoint.stores.peer import Neighbour, derive
from holdfast.checkpoint.stores.peer_server import PeerServer
from holdfast.errors import UsageError
from holdfast.launch.memory_options import TierOptions
from holdfast.launch.memory_tier import own_folder
from holdfast.launch.report import Identity

_log = logging.getLogger("holdfast.launch.local_tier")


class LocalHost:
    """Owns a folder of the volume. What an earlier launcher left in it is still good."""

    def __init__(self, options: TierOptions, *, identity: Identity, host: str) -> None:
        self._options = options
        self._me = (identity.node, identity.pod_uid)
        self._host = host
        self._server: PeerServer | None = None
        self._lock = -1
        self._folder = options.root

    def start(self) -> None:
        """Take a folder, and serve it; UsageError if there is none to be had."""
        try:
            self._folder, self._lock = own_folder(self._options.root)
            self._server = PeerServer(self._folder, host=self._host or None, store=LocalStore)
        except OSError as error:
            raise UsageError(
                f"the local tier at {self._options.root} cannot be used: {error.strerror}; give a folder on a disk "
                "of the node that this process may write (checkpoint.local, or --local-tier PATH)"
            ) from error
        _log.info("commits are kept on the node's disk", extra={"fields": {"folder": str(self._folder)}})

    def admit(self, job_key: bytes) -> None:
        """Serve who holds the job's key."""
        if self._server is not None:
            self._server.key = derive(job_key)

    def describe(self) -> dict[str, Any] | None:
        """What a rank must know, for its welcome."""
        server = self._server
        if server is None or server.key is None:
            return None
        options, (node, pod) = self._options, self._me
        return LocalSettings(
            folder=self._folder,
            limit=options.limit,
            interval=options.interval,
            me=Neighbour(node=node, pod=pod, host=self._host or "127.0.0.1", port=server.port),
            key=server.key,
        ).to_json()

    @property
    def strangers(self) -> int:
        """Who was turned away for want of that key."""
        return 0 if self._server is None else self._server.strangers

    def close(self, *, complete: bool) -> None:
        """Let go of the folder; of a job that is complete, nothing is kept."""
        if self._server is not None:
            self._server.close()
        for folder in own_folders(self._folder) if complete else []:
            shutil.rmtree(folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
