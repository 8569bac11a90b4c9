"""The memory of another node as a store, and the copies that it takes for others: TCP, with the job's key. No torch.

    server → {nonce}
    client → {nonce, mac}        it holds the key
    server → {mac}               so does the server
    client → {op, …}             any number of requests, each answered before the next

A message is a length and a JSON object. The bytes of a copy follow its request in pieces of 8 MiB, each checked
against the digest that the request named for it; bytes that are read are checked by the reader against the manifest.
What a copy is made of counts only once all of it is there: the slot says so (`slots`).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import xxhash

from holdfast.checkpoint.manifest import CHUNK_BYTES, FileRecord, Manifest, decode, encode
from holdfast.checkpoint.names import MANIFEST, CommitName, is_shard, parse_commit
from holdfast.checkpoint.stores import Incoming
from holdfast.checkpoint.stores.memory import MemoryStore, SlotSource
from holdfast.checkpoint.stores.slots import PADDING, Place, Slot, SlotSet, SlotWriter, remove
from holdfast.errors import CheckpointError, DamagedError, NoRoomError
from holdfast.worlds import Claim, Pair

_log = logging.getLogger("holdfast.checkpoint.peer")

_LENGTH: Final = 4
_MAX_MESSAGE: Final = 256 << 20
_MAX_GREETING: Final = 1024
_MAX_CONNECTIONS: Final = 1024
_GREETING_SECONDS: Final = 5.0
# How long one send or receive waits before it is asked whether there is still a reason to.
_SLICE_SECONDS: Final = 0.25
_PATIENCE_SECONDS: Final = 30.0
# A node that lost its power says nothing: its connections are given up after this many seconds of silence.
_SILENT_SECONDS: Final = 60
# Connections to one neighbour at a time: while the bytes of one are verified, another's are on their way.
_STREAMS: Final = 4
_THROTTLED_BYTES: Final = 1 << 20
# What a request can be by which nothing can be done.
_UNUSABLE: Final = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_OWNER: Final = re.compile(r"[a-z0-9-]{1,80}", re.ASCII)


@dataclass(frozen=True, kw_only=True, order=True)
class Neighbour:
    """A launcher that keeps commits in memory: on which node, and where it is reached."""

    node: str
    pod: str
    host: str
    port: int

    def to_json(self) -> dict[str, Any]:
        """Wire form."""
        return vars(self).copy()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Neighbour:
        """Read it; what a newer release adds is left out."""
        return cls(node=str(value["node"]), pod=str(value["pod"]), host=str(value["host"]), port=int(value["port"]))


def derive(job_key: bytes) -> bytes:
    """The key for this use alone: ranks get it, and never the job's."""
    return hmac.new(job_key, b"holdfast-memory-1", hashlib.sha256).digest()


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


class _Wire:
    """Messages and bytes over one connection. `check` may raise while it waits; `until` ends the greeting."""

    def __init__(
        self,
        sock: socket.socket,
        check: Callable[[], None] = lambda: None,
        *,
        limit: int = _MAX_MESSAGE,
        every: float = _SLICE_SECONDS,
    ) -> None:
        self._socket = sock
        self._check = check
        self._every = every
        self.limit = limit
        self.until = float("inf")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_SECONDS // 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_SECONDS // 6)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.settimeout(every)

    def send(self, message: Mapping[str, Any]) -> None:
        raw = json.dumps(message, separators=(",", ":")).encode()
        self.send_bytes(memoryview(len(raw).to_bytes(_LENGTH, "big") + raw))

    def receive(self, patience: float = _PATIENCE_SECONDS) -> dict[str, Any]:
        head = bytearray(_LENGTH)
        self.receive_into(memoryview(head), patience)
        length = int.from_bytes(head, "big")
        if length > self.limit:
            raise CheckpointError(f"a message of {length} bytes")
        raw = bytearray(length)
        self.receive_into(memoryview(raw))
        message = json.loads(raw)
        if not isinstance(message, dict):
            raise CheckpointError("a message must be a JSON object")
        return message

    def send_bytes(self, data: memoryview) -> None:
        rest = data
        while rest.nbytes:
            rest = rest[self._patiently(lambda rest=rest: self._socket.send(rest)) :]  # type: ignore[misc]

    def send_file(self, place: Place, per_second: int | None = None) -> None:
        """Bytes of a file, from the page cache to the network without a copy between."""
        started, sent = time.monotonic(), 0
        while sent < place.nbytes:
            most = min(place.nbytes - sent, _THROTTLED_BYTES if per_second else place.nbytes)
            at = place.offset + sent
            count = self._patiently(lambda at=at, most=most: self._send_some(place.fd, at, most))  # type: ignore[misc]
            sent += count
            if per_second:
                self._wait_until(started + sent / per_second)

    def receive_into(self, target: memoryview, patience: float = _PATIENCE_SECONDS) -> None:
        rest = target
        while rest.nbytes:
            count = self._patiently(lambda rest=rest: self._socket.recv_into(rest), patience)  # type: ignore[misc]
            if not count:
                raise ConnectionError("the other side closed the connection")
            rest = rest[count:]

    def _send_some(self, fd: int, offset: int, most: int) -> int:
        try:
            sent = os.sendfile(self._socket.fileno(), fd, offset, most)
        except BlockingIOError:
            writable = select.poll()
            writable.register(self._socket, select.POLLOUT)
            if not writable.poll(self._every * 1000):
                raise TimeoutError from None
            return self._send_some(fd, offset, most)
        if not sent:
            raise ConnectionError("it was cut off while it was sent")
        return sent

    def _wait_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            self._check()
            time.sleep(min(left, self._every))

    def _patiently(self, act: Callable[[], int], patience: float = _PATIENCE_SECONDS) -> int:
        deadline = min(self.until, time.monotonic() + patience)
        while time.monotonic() <= self.until:
            try:
                return act()
            except TimeoutError:
                self._check()
                if time.monotonic() > deadline:
                    raise
        raise TimeoutError("it took too long")

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _mac(key: bytes, role: str, *nonces: str) -> str:
    return hmac.new(key, "\n".join((role, *nonces)).encode(), hashlib.sha256).hexdigest()


# The side that asks


class Peer:
    """Connections to a neighbour, opened when they are needed and again after they broke. Any thread may ask."""

    def __init__(self, neighbour: Neighbour, key: bytes, check: Callable[[], None] = lambda: None) -> None:
        self.neighbour = neighbour
        self._key = key
        self._check = check
        self._free: list[_Wire] = []
        self._turns = threading.Semaphore(_STREAMS)

    def ask(self, request: Mapping[str, Any], act: Callable[[_Wire], None] = lambda _: None) -> dict[str, Any]:
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
        """Hang up."""
        while self._free:
            self._free.pop().close()

    @property
    def _who(self) -> str:
        return f"{self.neighbour.pod} on {self.neighbour.node}"

    def _asked(self, request: Mapping[str, Any], act: Callable[[_Wire], None]) -> dict[str, Any]:
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

    def _connect(self) -> _Wire:
        there = (self.neighbour.host, self.neighbour.port)
        wire = _Wire(socket.create_connection(there, timeout=_GREETING_SECONDS), self._check)
        try:
            theirs = str(wire.receive(_GREETING_SECONDS)["nonce"])
            mine = secrets.token_hex(16)
            wire.send({"nonce": mine, "mac": _mac(self._key, "client", theirs, mine)})
            proof = str(wire.receive(_GREETING_SECONDS).get("mac", ""))
        except (KeyError, CheckpointError, OSError, ValueError) as error:
            wire.close()
            raise ConnectionError(f"it does not answer as a launcher of this job does: {error}") from error
        if not hmac.compare_digest(proof, _mac(self._key, "server", theirs, mine)):
            wire.close()
            raise ConnectionError("it does not hold this job's key")
        return wire


class PeerSource:
    """A file in a neighbour's memory."""

    def __init__(self, peer: Peer, name: CommitName, file: str, jobs: list[str] | None) -> None:
        self._peer = peer
        self._where = {"name": str(name), "file": file, "jobs": jobs}
        self._nbytes = int(peer.ask({"op": "open", **self._where})["bytes"])

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self._nbytes

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fetch a part of it."""
        if offset + target.nbytes > self._nbytes:
            raise DamagedError(f"{self._where['file']} ends before byte {offset + target.nbytes}")
        if target.nbytes:
            request = {"op": "read", **self._where, "offset": offset, "bytes": target.nbytes}
            self._peer.ask(request, lambda wire: _expect(wire, target))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The connection is the store's."""


def _expect(wire: _Wire, target: memoryview) -> None:
    """The bytes, unless it is told at once that they are not to be had."""
    first = wire.receive()
    if "damaged" in first:
        raise DamagedError(str(first["damaged"]))
    if "error" in first:
        raise CheckpointError(str(first["error"]))
    wire.receive_into(target)


class PeerStore:
    """Another launcher's memory: its own ranks' slots, and those that it keeps for others."""

    def __init__(self, peer: Peer, jobs: Collection[str] | None = None) -> None:
        self._peer = peer
        self._jobs = None if jobs is None else sorted(jobs)

    @property
    def url(self) -> str:
        """Which one."""
        return f"memory://{self._peer.neighbour.node}/{self._peer.neighbour.pod}"

    @property
    def shared(self) -> bool:
        """Each rank has other neighbours."""
        return False

    def commits(self) -> tuple[CommitName, ...]:
        """What has its manifest there; nothing if it cannot be reached: what it has may lie elsewhere too."""
        try:
            told = self._peer.ask({"op": "list", "jobs": self._jobs})["commits"]
        except CheckpointError as error:
            _log.warning("no commits from a neighbour's memory: %s", error)
            return ()
        return tuple(name for text in told if (name := parse_commit(str(text))) is not None)

    def claims(self) -> tuple[Claim, ...]:
        """None, as in memory everywhere."""
        return ()

    def manifest(self, name: CommitName) -> Manifest:
        """The manifest of a commit."""
        told = self._peer.ask({"op": "manifest", "name": str(name), "jobs": self._jobs})
        manifest = decode(str(told["manifest"]).encode())
        if (manifest.step, manifest.pair) != (name.step, name.pair):
            raise DamagedError(f"{MANIFEST} is that of step {manifest.step}, attempt {manifest.pair}")
        return manifest

    def open(self, name: CommitName, file: str) -> PeerSource:
        """One of its files."""
        return PeerSource(self._peer, name, file, self._jobs)

    def receive(self, name: CommitName) -> Incoming:
        """Not by hand: a rank's slots are copied with `send`."""
        raise CheckpointError(f"{self.url} takes copies of slots only, as they are made")

    def quarantine(self, name: CommitName, reason: str) -> bool:
        """Its own launcher's ranks see to that."""
        return False

    def delete(self, name: CommitName) -> None:
        """The slots are overwritten in their turn."""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A rank's part of a commit, on its way to a neighbour. `room` is for all of it, manifest included."""

    owner: str
    job: str
    name: CommitName
    keep: tuple[CommitName, ...]
    files: Mapping[str, FileRecord]
    room: int

    def to_json(self) -> dict[str, Any]:
        """Wire form."""
        return {
            "owner": self.owner,
            "job": self.job,
            "name": str(self.name),
            "keep": [str(name) for name in self.keep],
            "files": {file: record.to_json() for file, record in self.files.items()},
            "room": self.room,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Copy:
        """Read what travelled; ValueError if it cannot be."""
        name, owner = parse_commit(value["name"]), str(value["owner"])
        files = {str(file): FileRecord.from_json(record) for file, record in value["files"].items()}
        if name is None or not _OWNER.fullmatch(owner) or not all(is_shard(file) for file in files):
            raise ValueError("not a copy of a rank's part of a commit")
        room, keep = int(value["room"]), _names(value["keep"])
        return cls(owner=owner, job=str(value["job"]), name=name, keep=keep, files=files, room=room)


def send(peer: Peer, copy: Copy, places: Sequence[Place], *, per_second: int | None = None) -> None:
    """Give a neighbour a rank's part of a commit, `places` in the order of its files; returns when all is there."""

    def content(wire: _Wire) -> None:
        for place in places:
            wire.send_file(place, per_second)

    peer.ask({"op": "put", **copy.to_json()}, content)


def seal(peer: Peer, copy: Copy, manifest: Manifest) -> None:
    """Let a neighbour know that what it was sent is part of a commit."""
    request = {"op": "seal", "owner": copy.owner, "name": str(copy.name), "manifest": encode(manifest).decode()}
    peer.ask(request)


def make_room(peer: Peer, name: CommitName, keep: Iterable[CommitName]) -> int:
    """Ask a launcher to let go of copies that nobody sends it any more, for slots of its own ranks' first commit; how
    many bytes it will let go of once that stands."""
    return int(peer.ask({"op": "room", "name": str(name), "keep": [str(kept) for kept in keep]})["bytes"])


# The side that keeps


class PeerServer:
    """Serves a launcher's memory. A thread for each connection: they wait for the network and copy."""

    def __init__(self, folder: Path, *, host: str | None, limit: int | None = None) -> None:
        self._folder = folder
        self._limit = limit
        self._keepers: dict[str, _Keeper] = {}
        self._lock = threading.Lock()
        self._wires: set[_Wire] = set()
        family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
        self._socket = socket.create_server((host or "", 0), family=family, backlog=128)
        self.port: int = self._socket.getsockname()[1]
        self.key: bytes | None = None
        self._closed = False
        threading.Thread(target=self._accept, name="holdfast-memory", daemon=True).start()

    def close(self) -> None:
        """Serve nobody any more. The slots stay."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            for wire in list(self._wires):
                wire.close()

    def keeper(self, owner: str) -> _Keeper:
        """Who writes an owner's copies."""
        with self._lock:
            if owner not in self._keepers:
                self._keepers[owner] = _Keeper(self._folder, owner, self._limit)
            return self._keepers[owner]

    def make_room(self, pair: Pair, keep: Collection[CommitName], beside: str = "") -> int:
        """Let go of copies for who sends them elsewhere by now, but for the commit that training goes on from: how
        many bytes are held for that alone, until another one stands. `beside` is whose copies stay."""
        later = 0
        for path in sorted(self._folder.glob("for-*.slot-[0-9]")):
            owner = path.name.partition(".")[0].removeprefix("for-")
            if owner != beside:
                later += self._let_go(path, self.keeper(owner), pair, keep)
        return later

    @staticmethod
    def _let_go(path: Path, keeper: _Keeper, pair: Pair, keep: Collection[CommitName]) -> int:
        if not keeper.lock.acquire(blocking=False):
            return 0  # it is being filled
        try:
            if keeper.newest is not None and keeper.newest >= pair:
                return 0
            if _held(path) in keep:
                return path.stat().st_size
            keeper.forget()
            remove(path)
        finally:
            keeper.lock.release()
        return 0

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if not self._closed:
                    _log.warning("a connection to this launcher's memory could not be taken: %s", error)
                    time.sleep(_SLICE_SECONDS)  # out of descriptors: others go in time
                continue
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        key = self.key
        if key is None or len(self._wires) >= _MAX_CONNECTIONS:
            connection.close()
            return
        try:
            wire = _Wire(connection, limit=_MAX_GREETING)
            wire.until = time.monotonic() + _GREETING_SECONDS
            threading.Thread(target=self._serve, args=(wire, key), name="holdfast-memory", daemon=True).start()
        except (OSError, RuntimeError) as error:
            connection.close()
            _log.warning("a connection to this launcher's memory could not be served: %s", error)

    def _serve(self, wire: _Wire, key: bytes) -> None:
        session = _Session(self, self._folder, wire)
        self._wires.add(wire)
        try:
            if self._greet(wire, key):
                wire.limit, wire.until = _MAX_MESSAGE, float("inf")
                while True:
                    session.answer(wire.receive(float("inf")))
        except (OSError, CheckpointError, *_UNUSABLE) as error:
            _log.debug("a connection to this launcher's memory ended: %s", error)
        finally:
            session.close()
            self._wires.discard(wire)
            wire.close()

    def _greet(self, wire: _Wire, key: bytes) -> bool:
        mine = secrets.token_hex(16)
        wire.send({"nonce": mine})
        proof = wire.receive(_GREETING_SECONDS)
        theirs = str(proof["nonce"])
        if not hmac.compare_digest(str(proof["mac"]).encode(), _mac(key, "client", mine, theirs).encode()):
            _log.error("a connection to this launcher's memory was refused: it does not hold this job's key")
            return False
        wire.send({"mac": _mac(key, "server", mine, theirs)})
        return True


class _Keeper:
    """The only writer of one owner's copies; one at a time."""

    def __init__(self, folder: Path, owner: str, limit: int | None) -> None:
        self._folder = folder
        self._owner = f"for-{owner}"
        self._limit = limit
        self._pair: SlotSet | None = None
        self._writer: tuple[CommitName, SlotWriter] | None = None
        self.newest: Pair | None = None  # the attempt that sent copies last
        self.lock = threading.Lock()

    def begin(self, copy: Copy, promised: int = 0) -> SlotWriter:
        self._pair = self._pair or SlotSet(self._folder, self._owner, limit=self._limit, populate=False)
        self._writer, self.newest = None, copy.name.pair
        writer = self._pair.begin(copy.name, copy.room, keep=copy.keep, job=copy.job, promised=promised)
        self._writer = copy.name, writer
        return writer

    def forget(self) -> None:
        """Its slots are another's room by now."""
        self._writer = None
        if self._pair is not None:
            self._pair.close()
            self._pair = None

    def seal(self, name: CommitName, manifest: Manifest) -> None:
        if self._writer is None or self._writer[0] != name:
            raise CheckpointError(f"{name} was not copied here")
        self._writer[1].seal(manifest)


class _Session:
    """One connection's requests."""

    def __init__(self, server: PeerServer, folder: Path, wire: _Wire) -> None:
        self._server = server
        self._folder = folder
        self._wire = wire
        self._source: tuple[Any, SlotSource] | None = None

    def answer(self, request: Mapping[str, Any]) -> None:
        try:
            self._wire.send(self._answer(request))
        except DamagedError as error:
            self._wire.send({"damaged": str(error)})
        except CheckpointError as error:
            self._wire.send({"error": str(error), "full": isinstance(error, NoRoomError)})

    def close(self) -> None:
        if self._source is not None:
            self._source[1].__exit__(None, None, None)
            self._source = None

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match request["op"]:
            case "list":
                return {"commits": [str(name) for name in self._store(request).commits()]}
            case "manifest":
                return {"manifest": encode(self._store(request).manifest(_named(request))).decode()}
            case "open":
                return {"bytes": self._open(request).nbytes}
            case "read":
                return self._read(request)
            case "put":
                return self._put(Copy.from_json(request))
            case "seal":
                return self._seal(request)
            case "room":
                return {"bytes": self._server.make_room(_named(request).pair, _names(request["keep"]))}
            case other:
                return {"error": f"{other!r} is nothing that this release does"}

    def _store(self, request: Mapping[str, Any]) -> MemoryStore:
        jobs = request["jobs"]
        return MemoryStore(self._folder, None if jobs is None else frozenset(map(str, jobs)))

    def _open(self, request: Mapping[str, Any]) -> SlotSource:
        where = (request["name"], request["file"], request["jobs"])
        if self._source is None or self._source[0] != where:
            self.close()
            self._source = where, self._store(request).open(_named(request), str(request["file"]))
        return self._source[1]

    def _read(self, request: Mapping[str, Any]) -> dict[str, Any]:
        source = self._open(request)
        place = source.place(int(request["offset"]), int(request["bytes"]))
        self._wire.send({})
        self._wire.send_file(place)
        source.verify()
        return {}

    def _put(self, copy: Copy) -> dict[str, Any]:
        keeper = self._server.keeper(copy.owner)
        with keeper.lock:
            refused: CheckpointError | None = None
            try:
                writer = self._begin(keeper, copy)
                targets = [writer.buffer(file, record.nbytes) for file, record in copy.files.items()]
            except CheckpointError as error:
                refused, targets = error, []
            for index, record in enumerate(copy.files.values()):
                trouble = self._take(record, targets[index] if targets else None)
                refused = refused or (CheckpointError(trouble) if trouble else None)
            if refused is not None:
                raise refused
            writer.stage()
        return {}

    def _begin(self, keeper: _Keeper, copy: Copy) -> SlotWriter:
        try:
            return keeper.begin(copy)
        except NoRoomError:
            return keeper.begin(copy, self._server.make_room(copy.name.pair, copy.keep, beside=copy.owner))

    def _take(self, record: FileRecord, target: memoryview | None) -> str:
        """All bytes of a file, also if there is no place for them: the next request comes behind them."""
        trouble, waste = "", memoryview(bytearray(CHUNK_BYTES if target is None else 0))
        for index, begin in enumerate(range(0, record.nbytes, CHUNK_BYTES)):
            length = min(CHUNK_BYTES, record.nbytes - begin)
            chunk = waste[:length] if target is None else target[begin : begin + length]
            self._wire.receive_into(chunk)
            if target is not None and xxhash.xxh3_128_hexdigest(chunk) != record.chunks[index]:
                trouble = f"chunk {index} did not arrive as it was sent"
        return trouble

    def _seal(self, request: Mapping[str, Any]) -> dict[str, Any]:
        manifest = decode(str(request["manifest"]).encode())
        keeper = self._server.keeper(str(request["owner"]))
        with keeper.lock:
            keeper.seal(_named(request), manifest)
        return {}


def _held(path: Path) -> CommitName | None:
    try:
        slot = Slot(path)
    except (OSError, DamagedError):
        return None
    content = slot.content()
    slot.close()
    return None if content is None else content.name


def _names(texts: Iterable[Any]) -> tuple[CommitName, ...]:
    return tuple(name for text in texts if (name := parse_commit(str(text))) is not None)


def _named(request: Mapping[str, Any]) -> CommitName:
    name = parse_commit(str(request["name"]))
    if name is None:
        raise DamagedError(f"{request['name']!r} is not the name of a commit")
    return name


def room_for(files: Iterable[int], manifest: int) -> int:
    """Bytes that a slot must have for files of these lengths and a manifest."""
    return sum(nbytes + PADDING for nbytes in (*files, manifest))
