"""Uploads of checkpoints to the object store, from the launcher's side: a child process uploads asynchronously.

The child is not a rank: it never delays training, and it outlives the ranks. When the launcher exits, the newest
checkpoint may be uploaded in the rest of the pod's grace period.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.checkpoint.format.failure_causes import FailureCause
from holdfast.checkpoint.format.file_names import CheckpointName, parse_commit
from holdfast.checkpoint.tiers.uploader import UploadSettings
from holdfast.core.environment import helper_environment
from holdfast.core.errors import SpawnError
from holdfast.launcher.drain.last_checkpoint_plan import Speed
from holdfast.launcher.process.child import ChildProcess, ProcessExit, own_program

_log = logging.getLogger("holdfast.launcher.uploads")
_MOST_RESTARTS = 5
_LOOK_SECONDS = 0.5


@dataclass(kw_only=True)
class UploadCounts:
    """The uploads of this launcher."""

    commits: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        return {
            "commits": self.commits,
            "bytes": self.nbytes,
            "seconds": round(self.seconds, 3),
            "failures": dict(self.failures),
        }


class Uploads:
    """The child that uploads, started with the first checkpoint. Without settings it does nothing."""

    def __init__(
        self, settings: UploadSettings | None, folder: Path | None, arrived: Callable[[CheckpointName], None]
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._arrived = arrived
        self._child: ChildProcess | None = None
        self._socket: socket.socket | None = None
        self._rest = b""
        self._newest: CheckpointName | None = None
        self._done: CheckpointName | None = None
        self._troubled = ""
        self._ends = 0
        self.counts = UploadCounts()
        self.speed = Speed()

    @property
    def wanted(self) -> bool:
        """Whether checkpoints are uploaded at all."""
        return self._settings is not None and self._folder is not None

    def commit(self, name: CheckpointName) -> None:
        """Upload a checkpoint that is durable on the shared tier."""
        if self.wanted and name != self._newest and (self._child is not None or self._ends < _MOST_RESTARTS):
            self._newest = name
            self._send(name)

    async def finish(self, left: Callable[[], float], alive: Callable[[], None] = lambda: None) -> None:
        """Wait for the newest checkpoint while `left` returns more than 0 seconds, then end the child.

        `alive` is called meanwhile, so that the launcher still shows signs of life.
        """
        child, connection = self._child, self._socket
        if child is None or connection is None:
            return
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        if self._newest != self._done:
            _log.info("waits up to %.0f s for the upload of %s", left(), self._newest)
        while not child.reaped.is_set() and left() > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.reaped.wait(), min(_LOOK_SECONDS, left()))
            alive()
        self._on_message(connection)
        if self._newest != self._done:
            _log.warning("%s is not in %s: only the shared tier has it", self._newest, self._url)
        self._ends = _MOST_RESTARTS
        child.kill()

    @property
    def _url(self) -> str:
        return "" if self._settings is None else self._settings.url

    def _send(self, name: CheckpointName) -> None:
        try:
            connection = self._socket or self._start()
            connection.sendall(f"{name}\n".encode())
        except (OSError, SpawnError) as error:
            self._failed(FailureCause.PROCESS, f"{name} cannot be passed to the uploader process: {error}")

    def _start(self) -> socket.socket:
        own_end, worker_end = socket.socketpair()
        argv = own_program("holdfast.launcher.tiers.upload_worker", str(worker_end.fileno()))
        with worker_end:
            child = ChildProcess(
                argv=argv, environ=helper_environment(), on_exit=self._ended, pass_fds=(worker_end.fileno(),)
            )
        order = {"settings": self._settings.to_json() if self._settings else {}, "folder": str(self._folder)}
        own_end.sendall(json.dumps(order).encode() + b"\n")
        own_end.setblocking(False)
        self._child, self._socket, self._rest = child, own_end, b""
        asyncio.get_running_loop().add_reader(own_end, self._on_message, own_end)
        return own_end

    def _on_message(self, connection: socket.socket) -> None:
        data = b""
        with contextlib.suppress(BlockingIOError, ConnectionError, ValueError, OSError):
            data = connection.recv(1 << 16)
        if not data:
            with contextlib.suppress(ValueError, OSError):
                asyncio.get_running_loop().remove_reader(connection)
        *answers, self._rest = (self._rest + data).split(b"\n")
        for answer in answers:
            self._answered(json.loads(answer))

    def _answered(self, answer: Mapping[str, Any]) -> None:
        name = parse_commit(str(answer["name"]))
        if answer["cause"]:
            self._failed(str(answer["cause"]), f"{name} could not be uploaded: {answer['message']}")
        elif answer["gone"]:
            _log.info("%s was deleted before its upload was complete; the next checkpoint is uploaded instead", name)
        elif name is not None:
            self._count(name, int(answer["bytes"]), float(answer["seconds"]))
        if answer["untidy"]:
            _log.warning("%s: old checkpoints could not be deleted: %s", self._url, answer["untidy"])

    def _count(self, name: CheckpointName, nbytes: int, seconds: float) -> None:
        self.counts.commits += 1
        self.counts.nbytes += nbytes
        self.counts.seconds += seconds
        self.speed.took(nbytes, seconds)
        fields = {"step": name.step, "bytes": nbytes, "seconds": seconds}
        _log.info("%s is in %s%s", name, self._url, " again" if self._troubled else "", extra={"fields": fields})
        self._done, self._troubled, self._ends = name, "", 0
        self._arrived(name)

    def _failed(self, cause: str, message: str) -> None:
        """Count each failure. Log consecutive failures with the same cause once."""
        self.counts.failures[cause] += 1
        if cause != self._troubled:
            _log.error("%s; training continues, and the newest checkpoint is tried next", message)
        self._troubled = cause

    def _ended(self, ended: ProcessExit) -> None:
        if self._socket is not None:
            self._on_message(self._socket)
            with contextlib.suppress(ValueError, OSError):
                asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
        self._child = self._socket = None
        if ended.returncode == 0 or self._ends >= _MOST_RESTARTS:
            return
        self._ends += 1
        reason = ended.stderr_tail[-1] if ended.stderr_tail else f"exit code {ended.exit_code}"
        self._failed(FailureCause.PROCESS, f"the uploader process ended: {reason}")
