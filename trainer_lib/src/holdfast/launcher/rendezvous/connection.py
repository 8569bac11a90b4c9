"""The connection between the endpoint's launcher and the others: join, receive memberships, detect losses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.core.connections import PendingHandshakes
from holdfast.core.errors import AuthenticationError, ControlError, DocumentError, UsageError
from holdfast.launcher.network import handshake
from holdfast.launcher.rendezvous import endpoint
from holdfast.launcher.rendezvous.roster import LEASE_SECONDS, Joined, Record, Roster, job_key, rendezvous_key

_log = logging.getLogger("holdfast.launcher.rendezvous")
_BEAT_SECONDS = 0.5
_PUBLISH_SECONDS = 0.2
ENDPOINT = "endpoint"


class Endpoint:
    """Takes the operator's role on the launcher that owns the endpoint's address."""

    def __init__(
        self,
        *,
        roster: Roster,
        secret: bytes,
        accept: Callable[[dict[str, Any]], None],
        record: Callable[[], Record],
        on_rejected: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self._roster = roster
        self._secret = secret
        self._accept = accept
        self._record = record
        self._on_rejected = on_rejected
        self._now = now
        self._connections: dict[str, handshake.Connection] = {}
        self._handshakes: PendingHandshakes[asyncio.StreamWriter] = PendingHandshakes()
        self._published: dict[str, Any] | None = None

    async def serve(self, listener: socket.socket | None, own: Joined) -> None:
        """Accept members and publish memberships until cancelled. Without a listener, there is one member."""
        self._roster = self._roster.joined(own, self._now())
        server = None
        if listener is not None:
            server = await asyncio.start_server(self._welcome, sock=listener, limit=handshake.LIMIT)
        try:
            while True:
                self._publish()
                await asyncio.sleep(_PUBLISH_SECONDS)
        finally:
            if server is not None:
                server.close()
            for connection in self._connections.values():
                connection.abort()

    def _publish(self) -> None:
        record = self._record()
        self._roster = self._roster.found(record.foreign).publish(self._now())
        if not self._roster.published:
            return
        revision = 1 if self._published is None else int(self._published["revision"])
        document = self._roster.document(record, now=self._now(), revision=revision)
        if document == self._published:
            return
        document["revision"] = revision + 1
        self._published = document
        for connection in self._connections.values():
            connection.send({"type": "membership", "document": document})
        self._accept(with_key(document, self._secret))

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dropped = self._handshakes.begin(writer, handshake.peer_host(writer))
        if dropped is not None:
            dropped.transport.abort()
            self._on_rejected()
        try:
            connection = await handshake.answer(reader, writer, me=ENDPOINT, key=rendezvous_key(self._secret))
            first = await connection.receive()
            if first is None or first.get("type") != "join":
                raise ControlError("the first message of a launcher must be join")
            member = Joined(uid=connection.peer, entry=first["member"])
            if self._refuses(connection, first.get("asked")):
                return
        except handshake.NoHandshakeError:
            writer.transport.abort()
            return
        except (OSError, TimeoutError, ControlError, DocumentError, KeyError) as error:
            _log.error("a launcher was refused at the endpoint: %s", error)
            self._on_rejected()
            writer.transport.abort()
            return
        finally:
            self._handshakes.end(writer)
        self._connections[member.uid] = connection
        _log.info("%s joined", member.uid)
        self._roster = self._roster.joined(member, self._now())
        if self._published is not None:
            connection.send({"type": "membership", "document": self._published})
        await _receive(connection, lambda _: None)
        if self._connections.get(member.uid) is connection:
            del self._connections[member.uid]
            self._roster = self._roster.left(member.uid, self._now())
            _log.info("%s left the endpoint", member.uid)

    def _refuses(self, connection: handshake.Connection, requested: Any) -> bool:
        refusal = self._roster.terms.refusal(requested) if isinstance(requested, dict) else None
        if refusal is None:
            return False
        _log.error("%s was refused: on its host %s", connection.peer, refusal)
        connection.send({"type": "refuse", "message": refusal})
        connection.writer.close()  # after that is sent
        return True


async def join(
    connection: handshake.Connection,
    *,
    own: Joined,
    requested: Mapping[str, str],
    secret: bytes,
    accept: Callable[[dict[str, Any]], None],
) -> None:
    """Be a member until the endpoint is lost. Raises UsageError if the endpoint refuses."""
    connection.send({"type": "join", "member": dict(own.entry), "asked": dict(requested)})

    def on_message(body: dict[str, Any]) -> None:
        if body.get("type") == "refuse":
            raise UsageError(f"holdfast run: {body.get('message')}")
        if body.get("type") == "membership":
            accept(with_key(body["document"], secret))

    await _receive(connection, on_message)


async def _receive(connection: handshake.Connection, on_message: Callable[[dict[str, Any]], None]) -> None:
    """Read until the other side closes or is silent. Silence is counted in local beats, without local stalls."""
    quiet = 0

    async def beat() -> None:
        nonlocal quiet
        while quiet * _BEAT_SECONDS < LEASE_SECONDS:
            quiet += 1
            connection.send({"type": "beat"})
            await asyncio.sleep(_BEAT_SECONDS)
        connection.abort()

    beating = asyncio.create_task(beat())
    try:
        while (body := await connection.receive()) is not None:
            quiet = 0
            on_message(body)
    except ControlError as error:
        _log.warning("the connection to %s broke the protocol: %s", connection.peer, error)
    finally:
        beating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beating
        connection.abort()


async def dial(
    host: str,
    port: int,
    *,
    me: str,
    secret: bytes,
    timeout: float,
) -> handshake.Connection:
    """Connect to the endpoint, which may not exist yet. Log the result of each try when it changes.

    Raises UsageError after `timeout` seconds, and at once if the program at the endpoint is no launcher.
    """
    loop, logged = asyncio.get_running_loop(), ""
    deadline = loop.time() + timeout
    while True:
        where = f"{host}:{port}"
        try:
            address = endpoint.choose(await endpoint.look_up(host, port))
            where = f"{address}:{port}"
            return await handshake.dial(address, port, me=me, peer=ENDPOINT, key=rendezvous_key(secret), timeout=5.0)
        except (OSError, TimeoutError, handshake.ConnectionClosedError) as error:
            found = f"{where}: {_found(error)}"
            if loop.time() >= deadline:
                raise UsageError(f"--rdzv-endpoint {found}; start the launcher on that host") from error
        except AuthenticationError:
            raise
        except ControlError as error:
            raise UsageError(
                f"--rdzv-endpoint {where}: another program listens there, not a launcher ({error}): use another port"
            ) from error
        if found != logged:
            logged = found
            _log.info("waits up to %.0f s for the launcher at --rdzv-endpoint %s", deadline - loop.time(), found)
        await asyncio.sleep(0.2)


def _found(error: Exception) -> str:
    if isinstance(error, handshake.NoAnswerError):
        return "the program there accepts connections, but does not answer as a launcher"
    if isinstance(error, handshake.ConnectionClosedError):
        return "the program there closes connections, and does not answer as a launcher"
    if isinstance(error, ConnectionRefusedError):
        return "no program listens there"
    if isinstance(error, TimeoutError):
        return "the address does not answer"
    return str(error)


def with_key(document: dict[str, Any], secret: bytes) -> dict[str, Any]:
    """Return the document with the run's key, which is never sent."""
    return {**document, "jobKey": job_key(secret, str(document["job"]["uid"])).hex()}
