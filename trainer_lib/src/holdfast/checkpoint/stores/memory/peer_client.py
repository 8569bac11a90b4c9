"""The memory of another node as a store, and the copies that it is sent: TCP, with the job's key. No torch.

    server → {nonce}
    client → {nonce, mac}        it holds the key
    server → {mac}               so does the server
    client → {op, …}             any number of requests, each answered before the next

A message is a length and a JSON object. The bytes of a copy follow its request in pieces of 8 MiB, each checked
against the digest that the request named for it; bytes that are read are checked by the reader against the manifest.
What a copy is made of counts only once all of it is there: the slot says so (`slots`).
"""

from __future__ import annotations

import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.checkpoint.format.file_names import CheckpointName, is_shard, parse_commit
from holdfast.checkpoint.format.manifest import Manifest, decode_as, encode
from holdfast.checkpoint.format.records import FileRecord, whole_number
from holdfast.checkpoint.stores.base import NodeStore, OpenSource
from holdfast.checkpoint.stores.memory.peer_protocol import GREETING_SECONDS, MAX_GREETING, MAX_MESSAGE, Wire
from holdfast.checkpoint.stores.memory.slot import FileRange
from holdfast.checkpoint.stores.memory.slot_writer import PADDING
from holdfast.core.connections import derived_key, is_proof, proof
from holdfast.core.errors import CheckpointError, DamagedError, NoRoomError
from holdfast.core.json_fields import JsonFields
from holdfast.core.protocol import MEMORY_TIER

_log = logging.getLogger("holdfast.checkpoint.peer")

# Connections to one neighbour at a time: while the bytes of one are verified, another's are on their way.
STREAMS: Final = 4
_OWNER: Final = re.compile(r"[a-z0-9-]{1,80}", re.ASCII)


@dataclass(frozen=True, kw_only=True, order=True)
class Neighbour(JsonFields):
    """A launcher that keeps commits in memory: on which node, and where it is reached."""

    node: str
    pod: str
    host: str
    port: int


def derive(job_key: bytes) -> bytes:
    """The key for this use alone: ranks get it, and never the job's."""
    return derived_key(job_key, "holdfast-memory-1")


def successor(members: Iterable[Neighbour], me: Neighbour) -> Neighbour | None:
    """Who keeps the copies of `me`: on the next node in their order, never on its own; None if there is no other."""
    by_node: dict[str, list[Neighbour]] = {}
    for member in sorted({*members, me}):
        by_node.setdefault(member.node, []).append(member)
    nodes = sorted(by_node)
    if len(nodes) < 2:
        return None
    there = by_node[nodes[(nodes.index(me.node) + 1) % len(nodes)]]
    return there[by_node[me.node].index(me) % len(there)]


class Peer:
    """Connections to a neighbour, opened when they are needed and again after they broke. Any thread may ask."""

    def __init__(
        self,
        neighbour: Neighbour,
        key: bytes,
        check: Callable[[], None] = lambda: None,
        streams: int = STREAMS,
    ) -> None:
        self.neighbour = neighbour
        self._key = key
        self._check = check
        self._free: list[Wire] = []
        self._turns = threading.Semaphore(streams)

    def ask(self, request: Mapping[str, Any], act: Callable[[Wire], None] = lambda _: None) -> dict[str, Any]:
        """One request, what follows it, and the answer; CheckpointError if it cannot be had."""
        with self._turns:
            try:
                answer = self._asked(request, act)
            except (OSError, ValueError) as error:
                self._check()  # at the end of an attempt this is only what follows
                raise CheckpointError(f"{self._who}: {error}") from error
        if "damaged" in answer:
            raise DamagedError(str(answer["damaged"]))
        if "error" in answer:
            kind = NoRoomError if answer.get("full") else CheckpointError
            raise kind(f"{self._who}: {answer['error']}")
        return answer

    def close(self) -> None:
        while self._free:
            self._free.pop().close()

    @property
    def _who(self) -> str:
        return f"{self.neighbour.pod} on {self.neighbour.node}"

    def _asked(self, request: Mapping[str, Any], act: Callable[[Wire], None]) -> dict[str, Any]:
        try:
            wire = self._free.pop()
        except IndexError:
            wire = self._connect()
        try:
            wire.send(request)
            act(wire)
            answer = wire.receive()
        except BaseException:
            wire.close()  # in the middle of a message nothing else can be said
            raise
        self._free.append(wire)
        return answer

    def _connect(self) -> Wire:
        there = (self.neighbour.host, self.neighbour.port)
        wire = Wire(socket.create_connection(there, timeout=GREETING_SECONDS), self._check, limit=MAX_GREETING)
        wire.until = time.monotonic() + GREETING_SECONDS
        try:
            theirs = str(wire.receive(GREETING_SECONDS)["nonce"])
            mine = secrets.token_hex(16)
            wire.send({"nonce": mine, "mac": proof(self._key, "client", theirs, mine)})
            answer = str(wire.receive(GREETING_SECONDS).get("mac", ""))
        except (KeyError, CheckpointError, OSError, ValueError) as error:
            wire.close()
            raise ConnectionError(f"it does not answer as a launcher of this job does: {error}") from error
        if not is_proof(answer, self._key, "server", theirs, mine):
            wire.close()
            raise ConnectionError("it does not hold this job's key")
        wire.limit, wire.until = MAX_MESSAGE, float("inf")
        return wire


class PeerSource(OpenSource):
    """A file in a neighbour's memory. The connection is the store's."""

    def __init__(self, peer: Peer, name: CheckpointName, file: str, jobs: list[str] | None) -> None:
        self._peer = peer
        self._where = {"name": str(name), "file": file, "jobs": jobs}
        self.nbytes = _bytes_in(peer.ask({"op": "open", **self._where}))

    def read_into(self, offset: int, target: memoryview) -> None:
        if offset + target.nbytes > self.nbytes:
            raise DamagedError(f"{self._where['file']} ends before byte {offset + target.nbytes}")
        if target.nbytes:
            request = {"op": "read", **self._where, "offset": offset, "bytes": target.nbytes}
            self._peer.ask(request, lambda wire: _expect(wire, target))


def _expect(wire: Wire, target: memoryview) -> None:
    """The bytes, unless it is told at once that they are not to be had."""
    first = wire.receive()
    if "damaged" in first:
        raise DamagedError(str(first["damaged"]))
    if "error" in first:
        raise CheckpointError(str(first["error"]))
    wire.receive_into(target)


class PeerStore(NodeStore):
    """Another launcher's memory: its own ranks' slots, and those that it keeps for others; or its disk, by `tier`."""

    def __init__(self, peer: Peer, jobs: Collection[str] | None = None, *, tier: str = MEMORY_TIER) -> None:
        self._peer = peer
        self._tier = tier
        self._jobs = None if jobs is None else sorted(jobs)
        self.url = f"{tier}://{peer.neighbour.node}/{peer.neighbour.pod}"

    def commits(self) -> tuple[CheckpointName, ...]:
        """What has its manifest there; nothing if it cannot be reached: what it has may lie elsewhere too."""
        try:
            told = self._peer.ask({"op": "list", "jobs": self._jobs}).get("commits")
            if not isinstance(told, list):
                raise CheckpointError(f"{self.url} lists no commits")
        except CheckpointError as error:
            _log.warning("no commits from a neighbour's %s tier: %s", self._tier, error)
            return ()
        return names(told)

    def manifest(self, name: CheckpointName) -> Manifest:
        told = self._peer.ask({"op": "manifest", "name": str(name), "jobs": self._jobs})
        return decode_as(str(told.get("manifest")).encode(errors="replace"), name)  # what it cannot have has no seal

    def open(self, name: CheckpointName, file: str) -> PeerSource:
        return PeerSource(self._peer, name, file, self._jobs)

    def quarantine(self, name: CheckpointName, reason: str) -> bool:
        """Its own launcher's ranks see to that."""
        return False


@dataclass(frozen=True, kw_only=True)
class Copy(JsonFields):
    """A rank's part of a commit, on its way to a neighbour. `room` is for all of it, manifest included."""

    owner: str
    job: str
    name: CheckpointName
    keep: tuple[CheckpointName, ...]
    files: Mapping[str, FileRecord]
    room: int

    def __post_init__(self) -> None:
        if not _OWNER.fullmatch(self.owner) or not all(map(is_shard, self.files)):
            raise ValueError("not a copy of a rank's part of a commit")


def send(peer: Peer, copy: Copy, places: Sequence[FileRange], *, per_second: int | None = None) -> None:
    """Give a neighbour a rank's part of a commit, `places` in the order of its files; returns when all is there."""

    def content(wire: Wire) -> None:
        for place in places:
            wire.send_file(place, per_second)

    peer.ask({"op": "put", **copy.to_json()}, content)


def seal(peer: Peer, copy: Copy, manifest: Manifest) -> None:
    """Let a neighbour know that what it was sent is part of a commit."""
    request = {"op": "seal", "owner": copy.owner, "name": str(copy.name), "manifest": encode(manifest).decode()}
    peer.ask(request)


def make_room(peer: Peer, name: CheckpointName, keep: Iterable[CheckpointName]) -> int:
    """Ask a launcher to let go of copies that nobody sends it any more, for slots of its own ranks' first commit; how
    many bytes it will let go of once that stands."""
    return _bytes_in(peer.ask({"op": "room", "name": str(name), "keep": [str(kept) for kept in keep]}))


def _bytes_in(answer: Mapping[str, Any]) -> int:
    try:
        return whole_number(answer["bytes"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"a neighbour's answer lacks a number of bytes: {error}") from error


def names(texts: Iterable[Any]) -> tuple[CheckpointName, ...]:
    found = (parse_commit(str(text)) for text in texts)
    return tuple(name for name in found if name is not None and not name.staging)


def room_for(files: Iterable[int], manifest: int) -> int:
    """Bytes that a slot must have for files of these lengths and a manifest."""
    return sum(nbytes + PADDING for nbytes in (*files, manifest))
