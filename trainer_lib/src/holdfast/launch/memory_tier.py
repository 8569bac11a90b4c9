"""The memory tier as the launcher owns it: a folder of slots that outlives its ranks, and who serves it."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.checkpoint.near import MemorySettings
from holdfast.checkpoint.stores.peer import Neighbour, derive, successor
from holdfast.checkpoint.stores.peer_server import PeerServer
from holdfast.checkpoint.stores.slots import remove
from holdfast.constants import MEMORY_TIER, PEER_TIER
from holdfast.errors import UsageError
from holdfast.launch.hurry import Speed, Tier
from holdfast.launch.membership import Member
from holdfast.launch.memory_options import MemoryOptions
from holdfast.launch.report import Identity

_log = logging.getLogger("holdfast.launch.memory_tier")

_FOLDERS: Final = 256


class MemoryHost:
    """Owns a folder of the memory volume. What an earlier launcher left in it is still good."""

    def __init__(self, options: MemoryOptions, *, identity: Identity, host: str) -> None:
        self._options = options
        self._me = (identity.node, identity.pod_uid)
        self._host = host
        self._lock = -1
        self._folder = options.root
        self._server: PeerServer | None = None

    def start(self) -> None:
        """Take a folder, and serve it; UsageError if there is none to be had."""
        try:
            self._folder, self._lock = own_folder(self._options.root)
            self._server = PeerServer(self._folder, host=self._host or None, limit=self._options.limit)
        except OSError as error:
            raise UsageError(
                f"the memory tier at {self._options.root} cannot be used: {error.strerror}; give a folder on a "
                "memory volume that this process may write (checkpoint.memory, or --memory-tier PATH)"
            ) from error
        _log.info("commits are kept in memory", extra={"fields": {"folder": str(self._folder)}})

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
        return MemorySettings(
            folder=self._folder,
            limit=options.limit,
            interval=options.interval,
            peer_interval=options.peer_interval,
            per_second=options.per_second,
            me=Neighbour(node=node, pod=pod, host=self._host or "127.0.0.1", port=server.port),
            key=server.key,
        ).to_json()

    def tiers(self, speeds: Mapping[str, Speed], members: Iterable[Member]) -> list[Tier]:
        """Where a last commit of this world would lie: in memory here, and if copies are made, on the next node."""
        options, (node, _) = self._options, self._me
        memory = speeds[MEMORY_TIER].tier(MEMORY_TIER, node=node, due=options.interval == 1)
        there = self._copies_go_to(members)
        if there is None:
            return [memory]
        due = options.peer_interval == 1
        return [memory, speeds[PEER_TIER].tier(PEER_TIER, MEMORY_TIER, node=there.node, due=due)]

    def _copies_go_to(self, members: Iterable[Member]) -> Neighbour | None:
        """As each of its ranks chooses."""
        if self._options.peer_interval is None:
            return None
        node, pod = self._me
        others = [one for one in members if one.pod_uid != pod]
        world = [Neighbour(node=one.node, pod=one.pod_uid, host="", port=0) for one in others]
        return successor(world, Neighbour(node=node, pod=pod, host="", port=0))

    @property
    def strangers(self) -> int:
        """Who was turned away for want of that key."""
        return 0 if self._server is None else self._server.strangers

    def close(self, *, complete: bool) -> None:
        """Let go of the folder; of a job that is complete, nothing is kept."""
        if self._server is not None:
            self._server.close()
        if complete:
            for path in self._folder.glob("*.slot-*"):
                remove(path)
        if self._lock >= 0:
            os.close(self._lock)


def own_folder(root: Path) -> tuple[Path, int]:
    """The first one that no living launcher holds: several on one host share a volume."""
    for number in range(_FOLDERS):
        folder = root / f"launcher-{number}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return folder, lock
    raise UsageError(f"{root} has {_FOLDERS} launchers already: give another folder")
