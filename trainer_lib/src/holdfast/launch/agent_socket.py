"""The Unix socket between the launcher and its own rank processes: JSON objects, one a line.

Each connection belongs to the rank and the pair that its `hello` names. What a process of an older attempt says
is for its owner to drop: every message is handed on with the pair of its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.constants import MAX_LINE_BYTES
from holdfast.errors import UsageError
from holdfast.worlds import Pair

_MAX_PATH_BYTES = 107
_log = logging.getLogger("holdfast.launch.agent_socket")


@dataclass(frozen=True, kw_only=True)
class RankMessage:
    """One message of a rank process, tagged with the attempt for which the process was started."""

    rank: int
    local_rank: int
    pid: int
    pair: Pair
    type: str
    body: Mapping[str, Any]


class AgentSocket:
    """Serves `agent.sock`; one live connection a rank."""

    def __init__(self, path: Path, on_message: Callable[[RankMessage], None]) -> None:
        self._path = path
        self._on_message = on_message
        self._writers: dict[tuple[Pair, int], asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; a socket that an earlier launcher left behind is replaced."""
        if len(str(self._path).encode()) > _MAX_PATH_BYTES:
            raise UsageError(f"{self._path} is too long for a Unix socket: set HOLDFAST_RUN_DIR to a shorter path")
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, path=self._path, limit=MAX_LINE_BYTES)

    async def close(self) -> None:
        """Stop listening and end every connection."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers.values()):
            writer.close()
        self._path.unlink(missing_ok=True)

    def greeted(self, pair: Pair) -> set[int]:
        """The ranks of this attempt that speak to us: those that run Holdfast's loop."""
        return {rank for known, rank in self._writers if known == pair}

    def send(self, pair: Pair, message: Mapping[str, Any], *, rank: int | None = None) -> int:
        """Send to one rank of an attempt, or to all; returns how many were reached."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        reached = 0
        for (known, number), writer in list(self._writers.items()):
            if known == pair and rank in (None, number) and not writer.is_closing():
                writer.write(line)
                reached += 1
        return reached

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        key: tuple[Pair, int] | None = None
        try:
            hello = await _read(reader)
            if hello is None or hello.get("type") != "hello":
                return
            tag = _tag(hello)
            key = (tag.pair, tag.rank)
            self._writers[key] = writer
            self._on_message(tag)
            while (body := await _read(reader)) is not None:
                self._on_message(_message(tag, body))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            _log.warning("a rank process sent what this launcher cannot read: %r; its connection is closed", error)
        finally:
            if key is not None and self._writers.get(key) is writer:
                del self._writers[key]
            writer.close()


def _tag(hello: Mapping[str, Any]) -> RankMessage:
    return RankMessage(
        rank=int(hello["rank"]),
        local_rank=int(hello["localRank"]),
        pid=int(hello["pid"]),
        pair=Pair.from_json(hello),
        type="hello",
        body=hello,
    )


def _message(tag: RankMessage, body: Mapping[str, Any]) -> RankMessage:
    return RankMessage(
        rank=tag.rank, local_rank=tag.local_rank, pid=tag.pid, pair=tag.pair, type=str(body["type"]), body=body
    )


async def _read(reader: asyncio.StreamReader) -> Mapping[str, Any] | None:
    """One message, or None at the end of the stream."""
    line = b""
    with contextlib.suppress(ConnectionError):
        line = await reader.readline()
    if not line.endswith(b"\n"):
        return None
    body = json.loads(line)
    if not isinstance(body, dict):
        raise TypeError("a message is a JSON object")
    return body
