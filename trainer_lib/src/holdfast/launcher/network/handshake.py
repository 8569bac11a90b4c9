"""The connection of two launchers: JSON lines over TCP after a mutual challenge on the job's key.

    dialer   → {version, podUID, to, nonce}
    acceptor → {nonce, mac}      mac over role, both names and both nonces: proves the key
    dialer   → {mac}             the same proof of the dialer

The key itself is never sent. A recorded exchange cannot be replayed, because each side sends a new nonce.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.attempt import check_version
from holdfast.core.connections import is_proof, proof
from holdfast.core.errors import AuthenticationError, ControlError
from holdfast.core.limits import MAX_LINE_BYTES

HANDSHAKE_SECONDS = 3.0
LIMIT = MAX_LINE_BYTES
_PROTOCOL = "holdfast-control-1"


class NoHandshakeError(ControlError):
    """The other side connected and closed the connection without sending anything, so there was nothing to refuse."""


class ConnectionClosedError(ControlError):
    """The other side closed the connection during the handshake."""


class NoAnswerError(TimeoutError):
    """The other side accepted the connection, but did not answer the handshake in time."""


@dataclass(frozen=True)
class Connection:
    """An authenticated connection to `peer`."""

    peer: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, body: Mapping[str, Any]) -> None:
        self.writer.write(encode(body))

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message; None at the end of the stream."""
        return await read_line(self.reader)

    def abort(self) -> None:
        """Close at once, and discard what is queued."""
        self.writer.transport.abort()


def encode(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


async def read_line(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return one message; None at the end of the stream. Raises `ControlError` for anything else."""
    try:
        line = await reader.readline()
    except (ConnectionError, TimeoutError):
        return None
    except ValueError as error:  # a line beyond the limit
        raise ControlError(f"not a line of JSON: {error}") from error
    return _decode(line)


def _decode(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise ControlError(f"not a line of JSON: {error}") from error
    if not isinstance(body, dict):
        raise ControlError("a message must be a JSON object")
    return body


async def _first_line(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the first message of a connection; raise NoHandshakeError if it ends before its first byte."""
    try:
        line = await reader.readline()
    except ConnectionError as error:
        raise NoHandshakeError(f"the connection was closed before the greeting: {error}") from error
    except ValueError as error:
        raise ControlError(f"not a line of JSON: {error}") from error
    if not line:
        raise NoHandshakeError("the connection was closed before the greeting")
    return _decode(line)


async def dial(host: str, port: int, *, me: str, peer: str, key: bytes, timeout: float) -> Connection:
    """Connect and authenticate. Raises `OSError`, `TimeoutError` or `ControlError`."""
    async with asyncio.timeout(timeout):
        reader, writer = await asyncio.open_connection(host, port, limit=LIMIT)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            own_nonce = secrets.token_hex(16)
            writer.write(encode({"version": 1, "podUID": me, "to": peer, "nonce": own_nonce}))
            received = await _expect(reader, "nonce", "mac")
            transcript = (me, peer, own_nonce, received["nonce"])
            _check(received["mac"], key, "accept", *transcript, peer=peer)
            writer.write(encode({"mac": proof(key, _PROTOCOL, "dial", *transcript)}))
    except TimeoutError as error:
        writer.transport.abort()
        raise NoAnswerError(f"no answer to the greeting within {HANDSHAKE_SECONDS:.0f} s") from error
    except BaseException:
        writer.transport.abort()
        raise
    return Connection(peer, reader, writer)


def peer_host(writer: asyncio.StreamWriter) -> str:
    """Return the address of the other side."""
    return str((writer.get_extra_info("peername") or ("?",))[0])


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, me: str, key: bytes) -> Connection:
    """The acceptor's side of `dial`. Raises `TimeoutError`, `ControlError` or its subclass `NoHandshakeError`."""
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        first = _expected(await _first_line(reader), "podUID", "to", "nonce")
        check_version(first, "the greeting of a launcher")
        peer, own_nonce = first["podUID"], secrets.token_hex(16)
        if first["to"] != me:
            raise ControlError(f"{peer} connected to {first['to']}, but this is {me}")
        transcript = (peer, me, first["nonce"], own_nonce)
        writer.write(encode({"nonce": own_nonce, "mac": proof(key, _PROTOCOL, "accept", *transcript)}))
        received = await _expect(reader, "mac")
        _check(received["mac"], key, "dial", *transcript, peer=peer)
    return Connection(peer, reader, writer)


async def _expect(reader: asyncio.StreamReader, *names: str) -> dict[str, Any]:
    return _expected(await read_line(reader), *names)


def _expected(body: dict[str, Any] | None, *names: str) -> dict[str, Any]:
    if body is None:
        raise ConnectionClosedError("the other side closed the connection during the greeting")
    for name in names:
        value = body.get(name)
        # ASCII: what the proofs are computed over must be encodable, which a lone surrogate is not.
        if not isinstance(value, str) or not 0 < len(value) <= 256 or not value.isascii():
            raise ControlError(f"the greeting lacks a valid {name!r}")
    return body


def _check(given: str, key: bytes, role: str, *transcript: str, peer: str) -> None:
    if not is_proof(given, key, _PROTOCOL, role, *transcript):
        raise AuthenticationError(
            f"{peer} does not have this job's key; if it belongs to the job, set the same key on both"
        )
