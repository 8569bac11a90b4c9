"""The rank's side of the agent socket: what a training process tells its launcher, and what it is asked.

A thread of its own reads, so that a request is seen whatever the script is doing; the ranks act on it in their next
step, together. Without a launcher (a script started by hand) nothing is told and nothing is asked.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

from holdfast.constants import EXIT_PEER_LOST
from holdfast.errors import LaunchError
from holdfast.worlds import Claim, Pair

_log = logging.getLogger("holdfast.rank_agent")

_WELCOME_SECONDS: Final = 60.0
_RECEIVE_BYTES: Final = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Requests:
    """What was asked and not answered yet, by id."""

    checkpoint: tuple[str, ...] = ()
    quiesce: tuple[str, ...] = ()


class Agent(Protocol):
    """What the job needs of its launcher."""

    connected: bool

    def send(self, kind: str, **body: Any) -> None:
        """Tell something."""

    def known_claims(self) -> tuple[Claim, ...]:
        """The claims of the membership."""

    def requests(self) -> Requests:
        """What is asked now."""

    def answered(self, requests: Requests) -> None:
        """Forget what a commit has answered."""

    def wait_for_the_end(self) -> NoReturn:
        """Stay until the launcher ends this process."""

    def close(self) -> None:
        """Say nothing more."""


class NoAgent:
    """A script that was started by hand."""

    connected = False

    def send(self, kind: str, **body: Any) -> None:
        """Nobody listens."""

    def known_claims(self) -> tuple[Claim, ...]:
        """There is no membership."""
        return ()

    def requests(self) -> Requests:
        """Nobody asks."""
        return Requests()

    def answered(self, requests: Requests) -> None:
        """Nothing was asked."""

    def wait_for_the_end(self) -> NoReturn:
        """Nobody would come."""
        leave("nobody is there to end this process")

    def close(self) -> None:
        """Nothing is open."""


class RankAgent:
    """A connection to the launcher that started this process; when it ends, so does the process."""

    connected = True

    def __init__(self, path: Path, *, rank: int, local_rank: int, pair: Pair) -> None:
        self._lock = threading.Lock()
        self._welcome = threading.Event()
        self._claims: tuple[Claim, ...] = ()
        self._requests: dict[str, list[str]] = {"checkpoint": [], "quiesce": []}
        self._closing = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            raise LaunchError(
                f"cannot reach the launcher at {path}: {error.strerror}; "
                "unset HOLDFAST_AGENT_SOCKET to run this script by hand"
            ) from error
        self.send("hello", rank=rank, localRank=local_rank, pid=os.getpid(), **pair.to_json())
        threading.Thread(target=self._read, name="holdfast-agent", daemon=True).start()

    def send(self, kind: str, **body: Any) -> None:
        """Tell the launcher; a launcher that is gone ends this process."""
        line = json.dumps({"type": kind, **body}, separators=(",", ":")).encode() + b"\n"
        try:
            with self._lock:
                self._socket.sendall(line)
        except OSError as error:
            if not self._closing:
                leave(f"the launcher is gone: {error.strerror}")

    def known_claims(self) -> tuple[Claim, ...]:
        """The claims that the launcher's welcome named."""
        if not self._welcome.wait(_WELCOME_SECONDS):
            raise LaunchError(f"the launcher said no welcome within {_WELCOME_SECONDS:.0f} s: see its log")
        return self._claims

    def requests(self) -> Requests:
        """What is asked now."""
        with self._lock:
            return Requests(checkpoint=tuple(self._requests["checkpoint"]), quiesce=tuple(self._requests["quiesce"]))

    def answered(self, requests: Requests) -> None:
        """Forget what a commit has answered."""
        with self._lock:
            for kind, ids in (("checkpoint", requests.checkpoint), ("quiesce", requests.quiesce)):
                self._requests[kind] = [item for item in self._requests[kind] if item not in ids]

    def wait_for_the_end(self) -> NoReturn:
        """Stay until the launcher ends this process."""
        while True:
            threading.Event().wait()

    def close(self) -> None:
        """Say nothing more, and no longer mind when the launcher goes."""
        self._closing = True
        with self._lock:
            self._socket.close()

    def _read(self) -> None:
        buffer = b""
        while piece := self._receive():
            *lines, buffer = (buffer + piece).split(b"\n")
            for line in lines:
                self._hear(line)
        if not self._closing:
            leave("the launcher closed its socket")

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(_RECEIVE_BYTES)
        except OSError:
            return b""

    def _hear(self, line: bytes) -> None:
        try:
            self._handle(json.loads(line))
        except (ValueError, KeyError, TypeError, LaunchError) as error:
            _log.error("the launcher sent what this release cannot read: %s", error)

    def _handle(self, message: Mapping[str, Any]) -> None:
        match message["type"]:
            case "welcome":
                self._claims = tuple(Claim.from_json(claim) for claim in message["claims"])
                self._welcome.set()
            case "checkpoint" | "quiesce" as kind:
                with self._lock:
                    if message["id"] not in self._requests[kind]:
                        self._requests[kind].append(str(message["id"]))
            case _:
                pass  # a newer launcher may say more


def leave(why: str) -> NoReturn:
    """End this process at once: what it shares with others is gone, and that is not the script's fault.

    `os._exit`, because the ordinary way out would wait for communicators that never answer.
    """
    _log.warning("this process ends: %s", why)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_PEER_LOST)
