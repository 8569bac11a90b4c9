"""The rank's side of the agent socket: reports to the launcher, and requests from it.

A separate thread reads, so that a request is received whatever the script does. The ranks act on it together in their
next step.

Invariant: after this process sent `left` for an attempt ID, it does not vote in that attempt or in an earlier one.
While the script computes, the reading thread sends `left` at once. During a vote, the main thread sends it after the
vote, which ends soon because every wait checks the `CancelToken`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.checkpoint.policy.interval import LauncherFailures
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import LaunchError, PeerLostError
from holdfast.core.limits import MAX_TEXT
from holdfast.training.distributed.cancel_token import CancelToken
from holdfast.training.guards.out_of_memory import OutOfMemory
from holdfast.training.launcher_client import placement as places
from holdfast.training.launcher_client.connection import Parting, Requests
from holdfast.training.launcher_client.exit_watch import exit_peer_lost
from holdfast.training.launcher_client.placement import RankPlacement

_log = logging.getLogger("holdfast.rank_agent")

_WELCOME_SECONDS: Final = 60.0
_RECEIVE_BYTES: Final = 1 << 16


class LauncherClient:
    """The connection to the launcher that started this process. If the connection ends, the process exits."""

    connected = True

    def __init__(self, path: Path, *, slot: int | None, place: RankPlacement | None) -> None:
        self.parting: Callable[[], Parting] = Parting
        self.reached = 0
        self.durable = 0
        self.trained: AttemptId | None = None
        self.launcher_failures: LauncherFailures | None = None
        self.out_of_memory = OutOfMemory()
        self.tiers: Mapping[str, Mapping[str, Any]] = {}
        self._slot = slot
        self._sending = threading.Lock()
        self._state = threading.Condition()  # guards the fields below
        self._next = place
        self._attempt_id: AttemptId | None = None
        self._cancel = CancelToken()
        self._left: AttemptId | None = None
        self._voting = False
        self._owes_left = False
        self._staying = False
        self._awaited: tuple[AttemptId, str] | None = None  # the order to leave that arrived during `stay`
        self._claims: tuple[Claim, ...] | None = None
        self._requests: dict[str, list[str]] = {"checkpoint": [], "quiesce": [], "pause": [], "node_local": []}
        self._closing = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            raise LaunchError(
                f"cannot reach the launcher at {path}: {error.strerror}; "
                "unset HOLDFAST_AGENT_SOCKET to run this script by hand"
            ) from error
        if place is None:
            self.send("standby", slot=slot, pid=os.getpid())
        else:
            self.enter(place)
        threading.Thread(target=self._read, name="holdfast-agent", daemon=True).start()

    def send(self, kind: str, **body: Any) -> None:
        """Send a message to the launcher. If the launcher has exited, exit this process."""
        line = json.dumps({"type": kind, **body}, separators=(",", ":")).encode() + b"\n"
        try:
            with self._sending:
                self._socket.sendall(line)
        except OSError as error:
            if not self._closing:
                exit_peer_lost(f"the launcher is gone: {error.strerror}")

    # Places

    def on_standby(self) -> bool:
        """Return whether the process is on standby, before its first world."""
        with self._state:
            return self._next is None and self._attempt_id is None

    def next_place(self) -> RankPlacement:
        """Wait for a place from the launcher, and return the newest one."""
        if self.on_standby():
            self.send("ready")
        with self._state:
            self._state.wait_for(lambda: self._next is not None)
            place, self._next = self._next, None
        if place is None:
            raise LaunchError("the launcher sent no place for this process")
        return place

    def enter(self, place: RankPlacement) -> CancelToken:
        """Take a place. Requests to end the last attempt no longer apply."""
        attempt_id = place.attempt_id
        if attempt_id is None:
            raise LaunchError("the world of a launcher must have an attempt ID")
        with self._state:
            if self._attempt_id == attempt_id:
                return self._cancel
            self._attempt_id, self._cancel, self._claims = attempt_id, CancelToken(), None
            self._requests = {
                "checkpoint": self._requests["checkpoint"],
                "quiesce": [],
                "pause": [],
                "node_local": [],
            }
            if self._left is not None and self._left >= attempt_id:
                self._cancel.set("the launcher ended the attempt before its start")
            cancel = self._cancel
        self.send(
            "hello",
            slot=self._slot,
            rank=place.rank,
            localRank=place.local_rank,
            pid=os.getpid(),
            **attempt_id.to_json(),
        )
        return cancel

    def known_claims(self) -> tuple[Claim, ...]:
        """Return the claims in the launcher's welcome to this attempt."""
        with self._state:
            self._state.wait_for(lambda: self._claims is not None or self._cancel.is_set(), _WELCOME_SECONDS)
            if self._cancel.is_set():
                raise PeerLostError(self._cancel.reason)
            if self._claims is None:
                raise LaunchError(f"the launcher sent no welcome within {_WELCOME_SECONDS:.0f} s: check its log")
            return self._claims

    # Leaving

    def begin_vote(self) -> None:
        """Begin a vote. Until `end_vote`, only the main thread sends `left`."""
        with self._state:
            if self._cancel.is_set():
                raise PeerLostError(self._cancel.reason)
            self._voting = True

    def end_vote(self) -> None:
        """End a vote, and send `left` if it was requested meanwhile."""
        with self._state:
            self._voting = False
            owes, self._owes_left = self._owes_left, False
        if owes:
            self._send_left()

    def stay(self) -> None:
        """Delay orders to leave until `go`."""
        with self._state:
            self._cancel.check()
            self._staying = True

    def go(self) -> None:
        """Follow an order to leave that arrived meanwhile."""
        with self._state:
            self._staying = False
            awaited, self._awaited = self._awaited, None
        if awaited is not None:
            self._leave_requested(*awaited)

    def hurried(self) -> bool:
        """Return whether the launcher is waiting for this rank to leave."""
        with self._state:
            return self._awaited is not None

    def leave(self, reason: str) -> None:
        """Leave the attempt on the main thread's own decision."""
        with self._state:
            attempt_id = self._attempt_id
            if attempt_id is None or (self._left is not None and self._left >= attempt_id):
                return
            self._left = attempt_id
            self._cancel.set(reason)
        self._send_left()

    def lose_peers(self, message: str) -> None:
        """Report lost peers before `left`, so that the launcher searches for the lost rank while this one waits."""
        with self._state:
            reported = self._cancel.is_set()
        if not reported:
            self.send("peerLost", step=self.parting().step, message=message[:MAX_TEXT])
        self.leave(message)

    def _leave_requested(self, attempt_id: AttemptId, reason: str) -> None:
        with self._state:
            if self._staying:
                self._awaited = attempt_id, reason
                return
            self._left = attempt_id if self._left is None else max(self._left, attempt_id)
            if self._attempt_id is not None and self._attempt_id <= attempt_id:
                self._cancel.set(reason)
            self._owes_left = self._voting
            self._state.notify_all()
            if self._owes_left:
                return
        self._send_left()

    def _send_left(self) -> None:
        parting, attempt_id = self.parting(), self._left
        if attempt_id is not None:
            self.send("left", **attempt_id.to_json(), step=parting.step, inDoubt=parting.in_doubt, keep=parting.keep)

    # Requests

    def requests(self) -> Requests:
        """Return the current requests."""
        with self._state:
            return Requests(**{kind: tuple(ids) for kind, ids in self._requests.items()})

    def answered(self, requests: Requests) -> None:
        """Remove the requests that a checkpoint has answered."""
        with self._state:
            for kind, ids in self._requests.items():
                done = getattr(requests, kind)
                self._requests[kind] = [item for item in ids if item not in done]

    # Internal

    def close(self) -> None:
        """Send nothing more, and ignore the end of the launcher.

        The socket is shut down, because a plain close keeps it open while the reader waits in the kernel. The
        launcher must detect the end now: otherwise a slow exit of the interpreter would count as a hang.
        """
        self._closing = True
        with self._sending:
            with contextlib.suppress(OSError):  # the launcher has exited
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _read(self) -> None:
        buffer = b""
        while piece := self._receive():
            *lines, buffer = (buffer + piece).split(b"\n")
            for line in lines:
                self._receive_line(line)
        if not self._closing:
            exit_peer_lost("the launcher closed its socket")

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(_RECEIVE_BYTES)
        except OSError:
            return b""

    def _receive_line(self, line: bytes) -> None:
        try:
            self._handle(json.loads(line))
        except (ValueError, KeyError, TypeError, LaunchError) as error:
            _log.error("a message of the launcher cannot be read by this release: %s", error)

    def _handle(self, message: Mapping[str, Any]) -> None:
        match message["type"]:
            case "welcome":
                self._welcomed(message)
            case "checkpoint":
                self._request("checkpoint", str(message["id"]))
            case "quiesce":
                if message.get("near"):
                    self._request("node_local", str(message["id"]))  # first, so that no vote on the end lacks it
                self._request("quiesce" if message.get("commit", True) else "pause", str(message["id"]))
            case "leave":
                self._leave_requested(AttemptId.from_json(message), str(message.get("reason", ""))[:MAX_TEXT])
            case "world":
                self._take(places.from_message(message))
            case _:
                pass  # a message of a newer launcher

    def _welcomed(self, message: Mapping[str, Any]) -> None:
        claims = tuple(Claim.from_json(claim) for claim in message["claims"])
        with self._state:
            if "generation" in message and AttemptId.from_json(message) != self._attempt_id:
                return  # a welcome to an attempt that is over
            self._claims = claims
            self.reached = int(message.get("reached") or 0)
            self.durable = int(message.get("durable") or 0)
            self.trained = AttemptId.from_optional(message.get("trained"))
            self.launcher_failures = LauncherFailures.from_optional(message.get("books"))
            self.out_of_memory = OutOfMemory.from_json(message.get("outOfMemory") or {})
            self.tiers = message.get("tiers") or {}
            self._state.notify_all()

    def _request(self, kind: str, request: str) -> None:
        with self._state:
            if request not in self._requests[kind]:
                self._requests[kind].append(request)

    def _take(self, place: RankPlacement) -> None:
        with self._state:
            self._next = place
            if self._attempt_id is not None and place.attempt_id is not None and self._attempt_id < place.attempt_id:
                self._cancel.set(f"attempt {place.attempt_id} follows")
            self._state.notify_all()
