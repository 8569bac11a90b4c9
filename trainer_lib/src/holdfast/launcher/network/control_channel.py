"""The control channel: one authenticated connection to each other launcher, with heartbeats.

Of two launchers, the one with the lower pod UID connects. A closed connection is reported at once, silence after
`dead_after`. Silence is measured on a clock that stops while this event loop is stalled, so a local pause never makes
a peer look dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from holdfast.core.connections import PendingHandshakes
from holdfast.core.errors import AuthenticationError, ControlError, DocumentError
from holdfast.core.limits import backoff
from holdfast.launcher.membership.events import How
from holdfast.launcher.network import handshake

CONTROL_PORT: Final = 29401

_log = logging.getLogger("holdfast.launcher.control")
_MAX_QUEUED_BYTES = 8 << 20
_FIRST_RETRY_SECONDS = 0.05
_LONGEST_RETRY_SECONDS = 0.4
_NEVER_SEEN_SECONDS = 5.0
_BEAT = {"type": "beat"}


class Listener(Protocol):
    """Receives events about peers."""

    def peer_up(self, uid: str) -> None:
        """An authenticated connection is open in both directions."""

    def peer_down(self, uid: str, how: How) -> None:
        """The connection is lost, or could not be opened for long enough."""

    def peer_message(self, uid: str, body: Mapping[str, Any]) -> None: ...

    def connection_rejected(self) -> None:
        """A connection was refused because it did not prove that it has the job's key."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """The address of a peer's control channel."""

    host: str
    port: int


class AwakeClock:
    """The seconds for which this event loop ran: a longer gap between ticks counts as one tick."""

    def __init__(self, tick: float) -> None:
        self._tick = tick
        self._last: float | None = None
        self.now = 0.0

    def beat(self, moment: float) -> float:
        """Advance the clock. Return the seconds for which the loop was stalled beyond a tick."""
        gap = self._tick if self._last is None else moment - self._last
        self._last = moment
        self.now += min(gap, 2 * self._tick)
        return max(0.0, gap - 2 * self._tick)


class _Peer:
    """The state of one peer: its address if it is a member, its connection if there is one."""

    def __init__(self, uid: str, since: float) -> None:
        self.uid = uid
        self.address: Address | None = None
        self.connection: handshake.Connection | None = None
        self.dialing: asyncio.Task[None] | None = None
        self.last_heard = since
        self.since = since  # since when it has no connection
        self.told_down = False
        self.how = How.SILENT


class ControlChannel:
    """Accepts and opens connections, sends heartbeats, and reports peers and their messages to its listener."""

    def __init__(self, *, me: str, listener: Listener, heartbeat: float = 0.25, dead_after: float = 1.0) -> None:
        self._me = me
        self._listener = listener
        self._heartbeat = heartbeat
        self._dead_after = dead_after
        self._key: bytes | None = None
        self._peers: dict[str, _Peer] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._handshakes: PendingHandshakes[asyncio.StreamWriter] = PendingHandshakes()
        self._complaints: dict[str, str] = {}
        self._clock = AwakeClock(heartbeat / 4)
        self.port = 0

    async def start(self, host: str | None, port: int) -> int:
        """Listen on the requested port, or on a free one if it is taken. Return the port."""
        try:
            self._server = await self._listen(host, port)
        except OSError:
            self._server = await self._listen(host, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._spawn(self._watch())
        return self.port

    def configure(self, *, key: bytes, peers: Mapping[str, Address], heartbeat: float, dead_after: float) -> None:
        """Set the job's key and the peers to connect. Open connections stay."""
        self._key, self._heartbeat, self._dead_after = key, heartbeat, dead_after
        for uid, address in peers.items():
            if uid != self._me:
                self._peer(uid).address = address
        for uid, peer in list(self._peers.items()):
            if uid not in peers:
                peer.address = None
                if peer.connection is None and peer.dialing is None:
                    del self._peers[uid]
        self._dial_missing()

    def connected(self) -> frozenset[str]:
        """Return the peers with an open connection."""
        return frozenset(uid for uid, peer in self._peers.items() if peer.connection is not None)

    def heard_lately(self, uid: str) -> bool:
        """Whether the last message of this peer is still current: it sends changes before its next heartbeat."""
        peer = self._peers.get(uid)
        if peer is None or peer.connection is None:
            return False
        return self._clock.now - peer.last_heard <= 2 * self._heartbeat

    def send(self, uid: str, body: Mapping[str, Any]) -> None:
        """Send to a peer, or drop the message without a connection. Disconnect a peer that does not read."""
        peer = self._peers.get(uid)
        if peer is None or peer.connection is None:
            return
        writer = peer.connection.writer
        if writer.transport.get_write_buffer_size() > _MAX_QUEUED_BYTES:
            self._drop(peer, How.SILENT)
        else:
            peer.connection.send(body)

    async def close(self) -> None:
        """Send what is queued, then close everything."""
        if self._server is not None:
            self._server.close()
        writers = [peer.connection.writer for peer in self._peers.values() if peer.connection is not None]
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(0.5):
                await asyncio.gather(*(writer.drain() for writer in writers), return_exceptions=True)
                for writer in writers:
                    writer.close()
                await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self, host: str | None, port: int) -> asyncio.Server:
        return await asyncio.start_server(self._welcome, host, port, limit=handshake.LIMIT, reuse_address=True)

    def _peer(self, uid: str) -> _Peer:
        return self._peers.setdefault(uid, _Peer(uid, self._clock.now))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._keep(task)
        return task

    def _keep(self, task: asyncio.Task[Any] | None) -> None:
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            loop = asyncio.get_running_loop()
            loop.call_exception_handler({"message": "the control channel failed", "exception": error})

    def _dial_missing(self) -> None:
        for peer in self._peers.values():
            ours = peer.address is not None and self._me < peer.uid
            if ours and peer.connection is None and peer.dialing is None:
                peer.dialing = self._spawn(self._dial(peer))

    async def _dial(self, peer: _Peer) -> None:
        """Retry until connected, or until the peer is no longer a member."""
        tries = 0
        while peer.address is not None and peer.connection is None and self._key is not None:
            connection = await self._try(peer, peer.address, self._key)
            if connection is not None:
                await self._serve(connection)
                return
            await asyncio.sleep(backoff(tries, first=_FIRST_RETRY_SECONDS, longest=_LONGEST_RETRY_SECONDS))
            tries += 1
        peer.dialing = None

    async def _try(self, peer: _Peer, address: Address, key: bytes) -> handshake.Connection | None:
        try:
            return await handshake.dial(
                address.host, address.port, me=self._me, peer=peer.uid, key=key, timeout=self._dead_after
            )
        except ConnectionRefusedError:
            peer.how = How.REFUSED
        except (OSError, TimeoutError):
            peer.how = How.SILENT
        except (ControlError, DocumentError) as error:
            peer.how = How.CLOSED
            self._complain(peer.uid, error)
            if isinstance(error, AuthenticationError):
                self._listener.connection_rejected()
        return None

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._keep(asyncio.current_task())
        if self._key is None:
            writer.transport.abort()
            return
        host = handshake.peer_host(writer)
        members = {peer.address.host for peer in self._peers.values() if peer.address is not None}
        dropped = self._handshakes.begin(writer, host, members=members)
        if dropped is not None:
            dropped.transport.abort()
            self._listener.connection_rejected()
        try:
            connection = await handshake.answer(reader, writer, me=self._me, key=self._key)
        except handshake.NoHandshakeError:
            writer.transport.abort()  # a probe of the port, for example before a worker is admitted
            return
        except (OSError, TimeoutError, ControlError, DocumentError) as error:
            self._complain(host, error)
            self._listener.connection_rejected()
            writer.transport.abort()
            return
        finally:
            self._handshakes.end(writer)
        connection.send(_BEAT)
        await self._serve(connection)

    def _complain(self, whom: str, error: Exception) -> None:
        """Log a refusal once per peer and reason, not for every retry."""
        text = str(error) or type(error).__name__
        if self._complaints.get(whom) != text and len(self._complaints) < 1000:
            self._complaints[whom] = text
            level = logging.ERROR if isinstance(error, AuthenticationError) else logging.DEBUG
            _log.log(level, "control channel with %s refused: %s", whom, text)

    async def _serve(self, connection: handshake.Connection) -> None:
        """Serve a connection until it ends. A newer connection of the same peer replaces an older one."""
        _undelayed(connection.writer)
        peer = self._peer(connection.peer)
        try:
            await self._listen_to(peer, connection)
        except (ControlError, DocumentError) as error:
            _log.warning("control channel with %s closed: %s", peer.uid, error)
        finally:
            connection.abort()
            if peer.dialing is asyncio.current_task():
                peer.dialing = None
            if peer.connection is connection:
                self._drop(peer, How.CLOSED)
            else:
                self._dial_missing()

    async def _listen_to(self, peer: _Peer, connection: handshake.Connection) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(handshake.HANDSHAKE_SECONDS):
                if await connection.receive() is not None:  # the first heartbeat: the other direction works too
                    self._take(peer, connection)
        while peer.connection is connection and (body := await connection.receive()) is not None:
            peer.last_heard = self._clock.now
            if body.get("type") != "beat":
                self._listener.peer_message(peer.uid, body)

    def _take(self, peer: _Peer, connection: handshake.Connection) -> None:
        if peer.connection is not None:
            self._drop(peer, How.CLOSED)
        if peer.dialing is asyncio.current_task():  # not earlier: a second attempt would replace this connection
            peer.dialing = None
        peer.connection = connection
        peer.last_heard = self._clock.now
        peer.told_down = False
        self._complaints.pop(peer.uid, None)
        connection.send(_BEAT)
        self._listener.peer_up(peer.uid)

    def _drop(self, peer: _Peer, how: How) -> None:
        connection, peer.connection = peer.connection, None
        peer.since, peer.how, peer.told_down = self._clock.now, how, True
        if connection is not None:
            connection.abort()
            self._listener.peer_down(peer.uid, how)
        self._dial_missing()

    async def _watch(self) -> None:
        """Send heartbeats, and detect silent peers."""
        loop = asyncio.get_running_loop()
        tick, next_beat = self._heartbeat / 4, 0.0
        while True:
            stalled = self._clock.beat(loop.time())
            if stalled > self._dead_after:
                _log.warning("this launcher was suspended for %.1f s; no peer counts as lost for that time", stalled)
            if loop.time() >= next_beat:
                next_beat = loop.time() + self._heartbeat - tick / 2
                for uid in list(self._peers):
                    self.send(uid, _BEAT)
            for peer in list(self._peers.values()):
                self._judge(peer)
            await asyncio.sleep(tick)

    def _judge(self, peer: _Peer) -> None:
        if peer.connection is not None:
            if self._clock.now - peer.last_heard > self._dead_after:
                self._drop(peer, How.SILENT)
        elif peer.address is not None and not peer.told_down:
            patience = self._dead_after if peer.how is How.REFUSED else max(self._dead_after, _NEVER_SEEN_SECONDS)
            if self._clock.now - peer.since > patience:
                peer.told_down = True
                self._listener.peer_down(peer.uid, peer.how)


def _undelayed(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    if raw is not None:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
