"""A folder that one launcher owns and serves. Its ranks write checkpoints there, and all ranks can read them."""

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
    """One launcher's side of a tier. Checkpoints of an earlier launcher in the folder stay usable."""

    name: ClassVar[str]
    """The name in `checkpoint.<name>` and `--<name>-tier`."""
    place: ClassVar[str]
    """The kind of volume on which the user must provide a folder."""

    def __init__(self, options: TierOptions, *, identity: Identity, host: str) -> None:
        self._options = options
        self._root = self._folder = options.root
        self._identity = identity
        self._host = host
        self._server: PeerServer | None = None
        self._lock = -1

    def start(self) -> None:
        """Acquire a folder and serve it. Raises UsageError if no folder is available."""
        try:
            self._folder, self._lock = _own_folder(self._root)
            self._server = self._serve(self._folder, self._host or None)
        except OSError as error:
            raise UsageError(
                f"the {self.name} tier at {self._root} cannot be used: {error.strerror}; set a folder on "
                f"{self.place} that this process can write (checkpoint.{self.name}, or --{self.name}-tier PATH)"
            ) from error
        _log.info("checkpoints are kept on the %s tier", self.name, extra={"fields": {"folder": str(self._folder)}})

    def admit(self, job_key: bytes) -> None:
        """Serve connections that have the job's key."""
        if self._server is not None:
            self._server.key = derive(job_key)

    @property
    def rejected(self) -> int:
        """The number of connections that were refused because they did not have that key."""
        return 0 if self._server is None else self._server.rejected

    def close(self, *, complete: bool) -> None:
        """Release the folder. If the job is complete, delete its files."""
        if self._server is not None:
            self._server.close()
        if complete:
            self._forget(self._folder)
        if self._lock >= 0:
            os.close(self._lock)

    def describe(self) -> dict[str, Any] | None:
        """Return what a rank needs to use the tier, for its welcome; None before `admit`."""
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
        """Return where a last checkpoint of this world could lie; none for a disk that is lost with its node."""
        return []

    @abstractmethod
    def _serve(self, folder: Path, host: str | None) -> PeerServer:
        """Return a running server for the files in the folder."""

    @abstractmethod
    def _forget(self, folder: Path) -> None:
        """Delete the files of a complete job."""


def _own_folder(root: Path) -> tuple[Path, int]:
    """Return the first folder that no live launcher holds: several launchers of one host share a volume."""
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
    raise UsageError(f"{root} has {_FOLDERS} launchers already: set another folder")
