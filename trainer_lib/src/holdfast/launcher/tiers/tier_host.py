"""A folder of a volume that one launcher owns and serves: what its ranks commit there, all ranks of the job read."""

from __future__ import annotations

import fcntl
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from holdfast.checkpoint.stores.memory.peer_client import Neighbour, derive
from holdfast.checkpoint.stores.memory.peer_server import PeerServer
from holdfast.checkpoint.tiers.settings import TierSettings
from holdfast.core.errors import UsageError
from holdfast.launcher.drain.last_checkpoint_plan import Speed, TierEstimate
from holdfast.launcher.membership.document import Member
from holdfast.launcher.status.status_document import Identity
from holdfast.launcher.tiers.options import TierOptions

_log = logging.getLogger("holdfast.launcher.tier_host")

_FOLDERS: Final = 256


class TierHost(ABC):
    """One launcher's side of a tier. What an earlier launcher left in the folder is still good."""

    name: ClassVar[str]
    """As in `checkpoint.<name>` and `--<name>-tier`."""
    place: ClassVar[str]
    """On what a user is to give a folder."""

    def __init__(self, options: TierOptions, *, identity: Identity, host: str) -> None:
        self._options = options
        self._root = self._folder = options.root
        self._identity = identity
        self._host = host
        self._server: PeerServer | None = None
        self._lock = -1

    def start(self) -> None:
        """Take a folder, and serve it; UsageError if there is none to be had."""
        try:
            self._folder, self._lock = _own_folder(self._root)
            self._server = self._serve(self._folder, self._host or None)
        except OSError as error:
            raise UsageError(
                f"the {self.name} tier at {self._root} cannot be used: {error.strerror}; give a folder on "
                f"{self.place} that this process may write (checkpoint.{self.name}, or --{self.name}-tier PATH)"
            ) from error
        _log.info("commits are kept on the %s tier", self.name, extra={"fields": {"folder": str(self._folder)}})

    def admit(self, job_key: bytes) -> None:
        """Serve who holds the job's key."""
        if self._server is not None:
            self._server.key = derive(job_key)

    @property
    def strangers(self) -> int:
        """Who was turned away for want of that key."""
        return 0 if self._server is None else self._server.strangers

    def close(self, *, complete: bool) -> None:
        """Let go of the folder; of a job that is complete, nothing is kept."""
        if self._server is not None:
            self._server.close()
        if complete:
            self._forget(self._folder)
        if self._lock >= 0:
            os.close(self._lock)

    def describe(self) -> dict[str, Any] | None:
        """Return what a rank must know, for its welcome; None before this launcher is admitted."""
        server = self._server
        if server is None or server.key is None:
            return None
        me, options = self._identity, self._options
        address = Neighbour(node=me.node, pod=me.pod_uid, host=self._host or "127.0.0.1", port=server.port)
        return TierSettings(
            folder=self._folder,
            limit=options.limit,
            interval=options.interval,
            peer_interval=options.peer_interval,
            per_second=options.per_second,
            in_flight=options.in_flight,
            me=address,
            key=server.key,
        ).to_json()

    def estimates(self, speeds: Mapping[str, Speed], members: Sequence[Member]) -> list[TierEstimate]:
        """Return where a last checkpoint of this world could lie; nowhere on a disk that is lost with its node."""
        return []

    @abstractmethod
    def _serve(self, folder: Path, host: str | None) -> PeerServer:
        """Let others read what is in it."""

    @abstractmethod
    def _forget(self, folder: Path) -> None:
        """The job is complete: nothing of it is needed."""


def _own_folder(root: Path) -> tuple[Path, int]:
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
