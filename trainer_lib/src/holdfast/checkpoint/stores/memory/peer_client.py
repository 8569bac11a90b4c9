"""The memory of another node as a store, and the copies that it receives: TCP, with the job's key. No torch.

    server → {nonce}
    client → {nonce, mac}        proof that the client has the key
    server → {mac}               proof that the server has it
    client → {op, …}             any number of requests, each answered before the next

A message is a length and a JSON object. The bytes of a copy follow their request in pieces of 8 MiB. The server
checks each piece against the digest in the request. A reader checks the bytes that it reads against the manifest. A
copy counts only when it is complete, which its slot records (`slots`).
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
from holdfast.checkpoint.stores.memory.peer_protocol import HANDSHAKE_SECONDS, MAX_HANDSHAKE, MAX_MESSAGE, Wire
from holdfast.checkpoint.stores.memory.slot import FileRange
from holdfast.checkpoint.stores.memory.slot_writer import PADDING
from holdfast.core.connections import derived_key, is_proof, proof
from holdfast.core.errors import CheckpointError, CorruptCheckpointError, NoCapacityError
from holdfast.core.json_fields import JsonFields
from holdfast.core.protocol import MEMORY_TIER

_log = logging.getLogger("holdfast.checkpoint.peer")

# Connections per neighbour: while the bytes of one are verified, the bytes of another are being transferred.
STREAMS: Final = 4
_OWNER: Final = re.compile(r"[a-z0-9-]{1,80}", re.ASCII)


@dataclass(frozen=True, kw_only=True, order=True)
class Neighbour(JsonFields):
    """A launcher that keeps checkpoints in memory: its node, and its address."""

    node: str
    pod: str
    host: str
    port: int


def derive(job_key: bytes) -> bytes:
    """Return the key for this use only. Ranks receive it, but never the job's key."""
    return derived_key(job_key, "holdfast-memory-1")


def successor(members: Iterable[Neighbour], me: Neighbour) -> Neighbour | None:
    """Return the launcher that keeps the copies of `me`: on the next node in order; None if there
    is no other node.
    """
    by_node: dict[str, list[Neighbour]] = {}
    for member in sorted({*members, me}):
        by_node.setdefault(member.node, []).append(member)
    nodes = sorted(by_node)
    if len(nodes) < 2:
        return None
    there = by_node[nodes[(nodes.index(me.node) + 1) % len(nodes)]]
    return there[by_node[me.node].index(me) % len(there)]


class Peer:
    """Connections to a neighbour, opened on demand and reopened after a failure. Any thread may use them."""

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
        self._streams = threading.Semaphore(streams)

    def call(self, request: Mapping[str, Any], act: Callable[[Wire], None] = lambda _: None) -> dict[str, Any]:
        """Send one request and the data that follows it, and return the answer.

        Raise `CheckpointError` on failure.
        """
        with self._streams:
            try:
                answer = self._send(request, act)
            except (OSError, ValueError) as error:
                self._check()  # at the end of an attempt, the failure is only a consequence
                raise CheckpointError(f"{self._description}: {error}") from error
        if "damaged" in answer:
            raise CorruptCheckpointError(str(answer["damaged"]))
        if "error" in answer:
            kind = NoCapacityError if answer.get("full") else CheckpointError
            raise kind(f"{self._description}: {answer['error']}")
        return answer

    def close(self) -> None:
        while self._free:
            self._free.pop().close()

    @property
    def _description(self) -> str:
        return f"{self.neighbour.pod} on {self.neighbour.node}"

    def _send(self, request: Mapping[str, Any], act: Callable[[Wire], None]) -> dict[str, Any]:
        try:
            wire = self._free.pop()
        except IndexError:
            wire = self._connect()
        try:
            wire.send(request)
            act(wire)
            answer = wire.receive()
        except BaseException:
            wire.close()  # the connection is inside a message and cannot be used again
            raise
        self._free.append(wire)
        return answer

    def _connect(self) -> Wire:
        address = (self.neighbour.host, self.neighbour.port)
        wire = Wire(socket.create_connection(address, timeout=HANDSHAKE_SECONDS), self._check, limit=MAX_HANDSHAKE)
        wire.until = time.monotonic() + HANDSHAKE_SECONDS
        try:
            peer_nonce = str(wire.receive(HANDSHAKE_SECONDS)["nonce"])
            own_nonce = secrets.token_hex(16)
            wire.send({"nonce": own_nonce, "mac": proof(self._key, "client", peer_nonce, own_nonce)})
            answer = str(wire.receive(HANDSHAKE_SECONDS).get("mac", ""))
        except (KeyError, CheckpointError, OSError, ValueError) as error:
            wire.close()
            raise ConnectionError(f"it does not answer like a launcher of this job: {error}") from error
        if not is_proof(answer, self._key, "server", peer_nonce, own_nonce):
            wire.close()
            raise ConnectionError("it does not have this job's key")
        wire.limit, wire.until = MAX_MESSAGE, float("inf")
        return wire


class PeerSource(OpenSource):
    """A file in a neighbour's memory. The store owns the connection."""

    def __init__(self, peer: Peer, name: CheckpointName, file: str, jobs: list[str] | None) -> None:
        self._peer = peer
        self._file_id = {"name": str(name), "file": file, "jobs": jobs}
        self.nbytes = _bytes_in(peer.call({"op": "open", **self._file_id}))

    def read_into(self, offset: int, target: memoryview) -> None:
        if offset + target.nbytes > self.nbytes:
            raise CorruptCheckpointError(f"{self._file_id['file']} ends before byte {offset + target.nbytes}")
        if target.nbytes:
            request = {"op": "read", **self._file_id, "offset": offset, "bytes": target.nbytes}
            self._peer.call(request, lambda wire: _expect(wire, target))


def _expect(wire: Wire, target: memoryview) -> None:
    """Receive the bytes, unless the answer is an error."""
    first = wire.receive()
    if "damaged" in first:
        raise CorruptCheckpointError(str(first["damaged"]))
    if "error" in first:
        raise CheckpointError(str(first["error"]))
    wire.receive_into(target)


class PeerStore(NodeStore):
    """Another launcher's memory: the slots of its own ranks, and those that it keeps for others; or its disk, by
    `tier`.
    """

    def __init__(self, peer: Peer, jobs: Collection[str] | None = None, *, tier: str = MEMORY_TIER) -> None:
        self._peer = peer
        self._tier = tier
        self._jobs = None if jobs is None else sorted(jobs)
        self.url = f"{tier}://{peer.neighbour.node}/{peer.neighbour.pod}"

    def commits(self) -> tuple[CheckpointName, ...]:
        """Return the checkpoints with a manifest there; nothing if the node is unreachable, as other nodes may have
        copies.
        """
        try:
            listed = self._peer.call({"op": "list", "jobs": self._jobs}).get("commits")
            if not isinstance(listed, list):
                raise CheckpointError(f"{self.url} lists no checkpoints")
        except CheckpointError as error:
            _log.warning("no checkpoints from a neighbour's %s tier: %s", self._tier, error)
            return ()
        return names(listed)

    def manifest(self, name: CheckpointName) -> Manifest:
        answer = self._peer.call({"op": "manifest", "name": str(name), "jobs": self._jobs})
        # characters that cannot be encoded also break the seal
        return decode_as(str(answer.get("manifest")).encode(errors="replace"), name)

    def open(self, name: CheckpointName, file: str) -> PeerSource:
        return PeerSource(self._peer, name, file, self._jobs)

    def quarantine(self, name: CheckpointName, reason: str) -> bool:
        """Leave it to the ranks of that launcher."""
        return False


@dataclass(frozen=True, kw_only=True)
class Copy(JsonFields):
    """A rank's part of a checkpoint that is sent to a neighbour. `room` is its size in bytes, with the manifest."""

    owner: str
    job: str
    name: CheckpointName
    keep: tuple[CheckpointName, ...]
    files: Mapping[str, FileRecord]
    room: int

    def __post_init__(self) -> None:
        if not _OWNER.fullmatch(self.owner) or not all(map(is_shard, self.files)):
            raise ValueError("not a copy of a rank's part of a checkpoint")


def send(peer: Peer, copy: Copy, places: Sequence[FileRange], *, per_second: int | None = None) -> None:
    """Send a rank's part of a checkpoint to a neighbour, and return when it is complete.

    `places` are in the order of the copy's files.
    """

    def content(wire: Wire) -> None:
        for place in places:
            wire.send_file(place, per_second)

    peer.call({"op": "put", **copy.to_json()}, content)


def seal(peer: Peer, copy: Copy, manifest: Manifest) -> None:
    """Send the manifest to a neighbour, which makes its copy part of a checkpoint."""
    request = {"op": "seal", "owner": copy.owner, "name": str(copy.name), "manifest": encode(manifest).decode()}
    peer.call(request)


def free_space(peer: Peer, name: CheckpointName, keep: Iterable[CheckpointName]) -> int:
    """Request a launcher to free outdated copies for the slots of its own ranks' first checkpoint.

    Return the bytes that it will free only after that checkpoint is complete.
    """
    return _bytes_in(peer.call({"op": "room", "name": str(name), "keep": [str(kept) for kept in keep]}))


def _bytes_in(answer: Mapping[str, Any]) -> int:
    try:
        return whole_number(answer["bytes"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"a neighbour's answer lacks a byte count: {error}") from error


def names(texts: Iterable[Any]) -> tuple[CheckpointName, ...]:
    found = (parse_commit(str(text)) for text in texts)
    return tuple(name for name in found if name is not None and not name.staging)


def space_for(files: Iterable[int], manifest: int) -> int:
    """Return the bytes that a slot needs for files of these lengths and a manifest."""
    return sum(nbytes + PADDING for nbytes in (*files, manifest))
