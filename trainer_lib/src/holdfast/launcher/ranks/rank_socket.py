"""The Unix socket between the launcher and its rank processes, with one JSON object per line.

A connection belongs to one process for its lifetime. Each `hello` moves it to another attempt, and later messages
belong to that attempt. Every message carries the attempt ID of its connection; the receiver drops old ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.attempt import AttemptId
from holdfast.core.errors import DocumentError, UsageError
from holdfast.core.limits import MAX_LINE_BYTES

_MAX_PATH_BYTES = 107
_FIRST_MESSAGES = frozenset({"hello", "standby"})
_log = logging.getLogger("holdfast.launcher.agent_socket")


class Connection:
    """One rank process at the other end, and how it identified itself."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.slot: int | None = None  # None: a version that cannot be kept between attempts
        self.pid = 0
        self.attempt_id: AttemptId | None = None
        self.rank: int | None = None
        self.over = asyncio.Event()  # set when all its messages are processed
        self.over_at: float | None = None

    @property
    def open(self) -> bool:
        """Whether messages can still be sent to it."""
        return not self.over.is_set() and not self._writer.is_closing()

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send a message. Return whether the connection was open."""
        if not self.open:
            return False
        self._writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        return True

    def greet(self, body: Mapping[str, Any]) -> None:
        """Process a `standby`, or a `hello` to an attempt."""
        slot = body.get("slot")
        self.slot, self.pid = None if slot is None else int(slot), int(body["pid"])
        if body["type"] == "hello":
            self.attempt_id, self.rank = AttemptId.from_json(body), int(body["rank"])

    def close(self) -> None:
        self._writer.close()


@dataclass(frozen=True, kw_only=True)
class RankMessage:
    """One message of a rank process, with the attempt ID of its connection."""

    connection: Connection
    attempt_id: AttemptId | None
    type: str
    body: Mapping[str, Any]

    def __str__(self) -> str:
        who = self.connection.slot if self.connection.rank is None else f"of rank {self.connection.rank}"
        return f"{self.type} from the process {who}"


class AgentSocket:
    def __init__(self, path: Path, on_message: Callable[[RankMessage], None]) -> None:
        self._path = path
        self._on_message = on_message
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. Replaces the socket of an earlier launcher."""
        if len(str(self._path).encode()) > _MAX_PATH_BYTES:
            raise UsageError(f"{self._path} is too long for a Unix socket: set HOLDFAST_RUN_DIR to a shorter path")
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, path=self._path, limit=MAX_LINE_BYTES)

    async def close(self) -> None:
        """Stop listening, and end every connection."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(writer)
        self._connections.add(connection)
        try:
            body = await _read(reader)
            if body is None or body.get("type") not in _FIRST_MESSAGES:
                return
            while body is not None:
                self._take(connection, body)
                body = await _read(reader)
        except (ValueError, KeyError, TypeError, RecursionError, DocumentError) as error:
            _log.warning("the message of a rank process cannot be read: %r; its connection is closed", error)
        finally:
            self._connections.discard(connection)
            connection.over_at = time.monotonic()
            connection.over.set()
            connection.close()

    def _take(self, connection: Connection, body: Mapping[str, Any]) -> None:
        kind = str(body["type"])
        if kind in _FIRST_MESSAGES:
            connection.greet(body)
        self._on_message(RankMessage(connection=connection, attempt_id=connection.attempt_id, type=kind, body=body))


async def _read(reader: asyncio.StreamReader) -> Mapping[str, Any] | None:
    """Return one message; None at the end of the stream."""
    line = b""
    with contextlib.suppress(ConnectionError):
        line = await reader.readline()
    if not line.endswith(b"\n"):
        return None
    body = json.loads(line)
    if not isinstance(body, dict):
        raise TypeError("a message is a JSON object")
    return body
