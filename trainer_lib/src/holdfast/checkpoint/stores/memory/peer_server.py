"""The server with which a launcher offers its memory to the job's other launchers, or its folder on a disk.

The memory includes the copies that the launcher keeps for others. `peer_client` describes the protocol. Each
connection has a thread, and only one of them at a time writes an owner's copies.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import xxhash

from holdfast.checkpoint.format.file_names import CheckpointName, parse_commit
from holdfast.checkpoint.format.manifest import Manifest, decode, encode
from holdfast.checkpoint.format.records import CHUNK_BYTES, FileRecord
from holdfast.checkpoint.stores.memory.peer_client import Copy, names
from holdfast.checkpoint.stores.memory.peer_protocol import (
    HANDSHAKE_SECONDS,
    MAX_HANDSHAKE,
    MAX_MESSAGE,
    SLICE_SECONDS,
    Wire,
)
from holdfast.checkpoint.stores.memory.slot import FileRange, Slot, remove
from holdfast.checkpoint.stores.memory.slot_writer import SlotWriter
from holdfast.checkpoint.stores.memory.slots import SlotSet
from holdfast.checkpoint.stores.memory.store import MemoryStore
from holdfast.core.attempt import AttemptId
from holdfast.core.connections import PendingHandshakes, is_proof, proof
from holdfast.core.errors import CheckpointError, CorruptCheckpointError, NoCapacityError

_log = logging.getLogger("holdfast.checkpoint.peer")

_MAX_CONNECTIONS: Final = 1024
# The errors of an invalid request.
_UNUSABLE: Final = (ValueError, LookupError, TypeError, AttributeError, OverflowError)


class ServedSource(Protocol):
    """A file whose bytes are sent from where they are."""

    @property
    def nbytes(self) -> int: ...

    def place(self, offset: int, nbytes: int) -> FileRange:
        """Return the place of the bytes, which are valid only if `verify` succeeds afterwards."""

    def verify(self) -> None:
        """Raise `CorruptCheckpointError` if the bytes may have changed."""

    def close(self) -> None:
        """Close the file."""


class Served(Protocol):
    """The part of a store that can be served."""

    def commits(self) -> tuple[CheckpointName, ...]:
        """Return the names of the checkpoints."""

    def manifest(self, name: CheckpointName) -> Manifest: ...

    def open(self, name: CheckpointName, file: str) -> ServedSource: ...


class PeerServer:
    """Serves a launcher's memory. Each connection has a thread, which waits for the network and copies."""

    def __init__(
        self,
        folder: Path,
        *,
        host: str | None,
        limit: int | None = None,
        store: Callable[[Path, Collection[str] | None], Served] = MemoryStore,
    ) -> None:
        self.store = store
        self._folder = folder
        self._limit = limit
        self._keepers: dict[str, _Keeper] = {}
        self._lock = threading.Lock()
        self._wires: set[Wire] = set()
        self._handshakes: PendingHandshakes[Wire] = PendingHandshakes()
        family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
        self._socket = socket.create_server((host or "", 0), family=family, backlog=128)
        self.port: int = self._socket.getsockname()[1]
        self.key: bytes | None = None
        self.rejected = 0  # connections that were rejected before they proved that they have the key
        self._closed = False
        threading.Thread(target=self._accept, name="holdfast-memory", daemon=True).start()

    def close(self) -> None:
        """Stop serving. The slots stay."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            for wire in list(self._wires):
                wire.close()

    def keeper(self, owner: str) -> _Keeper:
        with self._lock:
            if owner not in self._keepers:
                self._keepers[owner] = _Keeper(self._folder, owner, self._limit)
            return self._keepers[owner]

    def free_space(self, attempt_id: AttemptId, keep: Collection[CheckpointName], excluded: str = "") -> int:
        """Free copies whose owners now send them elsewhere, except the checkpoint from which training continues.

        Return the bytes that are kept only for that checkpoint, until another one is complete. Copies of `excluded`
        stay.
        """
        later = 0
        for path in sorted(self._folder.glob("for-*.slot-[0-9]")):
            owner = path.name.partition(".")[0].removeprefix("for-")
            if owner != excluded:
                later += self._release(path, self.keeper(owner), attempt_id, keep)
        return later

    @staticmethod
    def _release(path: Path, keeper: _Keeper, attempt_id: AttemptId, keep: Collection[CheckpointName]) -> int:
        if not keeper.lock.acquire(blocking=False):
            return 0  # the slot is being filled
        try:
            if keeper.newest is not None and keeper.newest >= attempt_id:
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
                connection, address = self._socket.accept()
            except OSError as error:
                if not self._closed:
                    _log.warning("a connection to this launcher's memory could not be accepted: %s", error)
                    time.sleep(SLICE_SECONDS)  # out of descriptors: connections close after a while
                continue
            self._admit(connection, str(address[0]))

    def _admit(self, connection: socket.socket, host: str) -> None:
        key = self.key
        if key is None or len(self._wires) >= _MAX_CONNECTIONS:
            connection.close()
            return
        try:
            wire = Wire(connection, limit=MAX_HANDSHAKE)
            wire.until = time.monotonic() + HANDSHAKE_SECONDS
            self._begin_handshake(wire, host)
            threading.Thread(target=self._serve, args=(wire, key), name="holdfast-memory", daemon=True).start()
        except (OSError, RuntimeError) as error:
            connection.close()
            _log.warning("a connection to this launcher's memory could not be served: %s", error)

    def _begin_handshake(self, wire: Wire, host: str) -> None:
        with self._lock:
            dropped = self._handshakes.begin(wire, host)
            if dropped is not None:
                self.rejected += 1
                dropped.close()

    def _serve(self, wire: Wire, key: bytes) -> None:
        session, known, silent = _Session(self, self._folder, wire), False, False
        self._wires.add(wire)
        try:
            known = self._handshake(wire, key)
            with self._lock:
                self._handshakes.end(wire)
            if known:
                wire.limit, wire.until = MAX_MESSAGE, float("inf")
                while True:
                    session.answer(wire.receive(float("inf")))
        except (OSError, CheckpointError, *_UNUSABLE) as error:
            silent = (
                isinstance(error, ConnectionError) and not wire.received_data
            )  # closed without any data: a probe of the port
            _log.debug("a connection to this launcher's memory ended: %s", error)
        finally:
            with self._lock:
                self._handshakes.end(wire)
                self.rejected += not known and not silent
            session.close()
            self._wires.discard(wire)
            wire.close()

    def _handshake(self, wire: Wire, key: bytes) -> bool:
        own_nonce = secrets.token_hex(16)
        wire.send({"nonce": own_nonce})
        answer = wire.receive(HANDSHAKE_SECONDS)
        peer_nonce = str(answer["nonce"])
        if not is_proof(str(answer["mac"]), key, "client", own_nonce, peer_nonce):
            _log.error(
                "a connection to this launcher's memory was refused: the other side does not have this job's key"
            )
            return False
        wire.send({"mac": proof(key, "server", own_nonce, peer_nonce)})
        return True


class _Keeper:
    """The only writer of one owner's copies."""

    def __init__(self, folder: Path, owner: str, limit: int | None) -> None:
        self._folder = folder
        self._owner = f"for-{owner}"
        self._limit = limit
        self._slots: SlotSet | None = None
        self._writer: tuple[CheckpointName, SlotWriter] | None = None
        self.newest: AttemptId | None = None  # the attempt that last sent copies
        self.lock = threading.Lock()

    def begin(self, copy: Copy, freed_later: int = 0) -> SlotWriter:
        self._slots = self._slots or SlotSet(self._folder, self._owner, limit=self._limit, populate=False)
        self._writer, self.newest = None, copy.name.attempt_id
        writer = self._slots.begin(copy.name, copy.room, keep=copy.keep, job=copy.job, freed_later=freed_later)
        self._writer = copy.name, writer
        return writer

    def forget(self) -> None:
        """Close the slots, whose memory was given to another owner."""
        self._writer = None
        if self._slots is not None:
            self._slots.close()
            self._slots = None

    def seal(self, name: CheckpointName, manifest: Manifest) -> None:
        if self._writer is None or self._writer[0] != name:
            raise CheckpointError(f"{name} was not copied here")
        self._writer[1].seal(manifest)


class _Session:
    """The requests of one connection."""

    def __init__(self, server: PeerServer, folder: Path, wire: Wire) -> None:
        self._server = server
        self._folder = folder
        self._wire = wire
        self._source: tuple[Any, ServedSource] | None = None

    def answer(self, request: Mapping[str, Any]) -> None:
        try:
            self._wire.send(self._answer(request))
        except CorruptCheckpointError as error:
            self._wire.send({"damaged": str(error)})
        except CheckpointError as error:
            self._wire.send({"error": str(error), "full": isinstance(error, NoCapacityError)})

    def close(self) -> None:
        if self._source is not None:
            self._source[1].close()
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
            case "put" | "seal" | "room" if self._server.store is not MemoryStore:
                raise ValueError("copies are kept in memory only")  # no client that supports this tier sends it
            case "put":
                return self._put(Copy.from_json(request))
            case "seal":
                return self._seal(request)
            case "room":
                return {"bytes": self._server.free_space(_named(request).attempt_id, names(request["keep"]))}
            case other:
                return {"error": f"{other!r} is not a request that this release supports"}

    def _store(self, request: Mapping[str, Any]) -> Served:
        jobs = request["jobs"]
        return self._server.store(self._folder, None if jobs is None else frozenset(map(str, jobs)))

    def _open(self, request: Mapping[str, Any]) -> ServedSource:
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
        except NoCapacityError:
            return keeper.begin(copy, self._server.free_space(copy.name.attempt_id, copy.keep, excluded=copy.owner))

    def _take(self, record: FileRecord, target: memoryview | None) -> str:
        """Receive all bytes of a file, even if they are discarded, because the next request follows them."""
        trouble, waste = "", memoryview(bytearray(CHUNK_BYTES if target is None else 0))
        for index, begin in enumerate(range(0, record.nbytes, CHUNK_BYTES)):
            length = min(CHUNK_BYTES, record.nbytes - begin)
            chunk = waste[:length] if target is None else target[begin : begin + length]
            self._wire.receive_into(chunk)
            if target is not None and xxhash.xxh3_128_hexdigest(chunk) != record.chunks[index]:
                trouble = f"chunk {index} was corrupted in transfer"
        return trouble

    def _seal(self, request: Mapping[str, Any]) -> dict[str, Any]:
        manifest = decode(str(request["manifest"]).encode())
        keeper = self._server.keeper(str(request["owner"]))
        with keeper.lock:
            keeper.seal(_named(request), manifest)
        return {}


def _held(path: Path) -> CheckpointName | None:
    try:
        slot = Slot(path)
    except (OSError, CorruptCheckpointError):
        return None
    content = slot.content()
    slot.close()
    return None if content is None else content.name


def _named(request: Mapping[str, Any]) -> CheckpointName:
    name = parse_commit(str(request["name"]))
    if name is None:
        raise CorruptCheckpointError(f"{request['name']!r} is not the name of a checkpoint")
    return name
