"""Connections of the agents' API: counted from their first packet, and closed when they exceed a limit."""

from __future__ import annotations

import asyncio
import logging
import ssl
from asyncio import sslproto
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, cast

from aiohttp import web
from aiohttp.web_protocol import ERROR, RequestHandler

from holdfast_operator.agents.limits import Limits

# aiohttp logs each request that it cannot parse, with a part of it that may contain a token.
_unheard = logging.getLogger(f"{__name__}.http")
_unheard.disabled = True

# The read buffer of a connection. Standard are 256 KiB, zeroed and thus resident: 0.3 MiB for each held poll.
_TLS_BUFFER_BYTES = 16 * 1024


class TlsConnection(sslproto.SSLProtocol):
    """One connection, counted from its start. asyncio's own servers report it only after the TLS handshake."""

    max_size = _TLS_BUFFER_BYTES

    def __init__(self, guard: ConnectionLimiter, context: ssl.SSLContext, limits: Limits) -> None:
        self._guard, self._handler = guard, guard()
        super().__init__(
            asyncio.get_running_loop(),
            self._handler,
            context,
            None,  # type: ignore[arg-type]
            server_side=True,
            ssl_handshake_timeout=limits.handshake_seconds,  # type: ignore[arg-type]
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._guard.admit(self._handler, cast(asyncio.Transport, transport)):
            super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._guard.forget(self._handler)


class ConnectionLimiter(web.Server):
    """Counts connections and closes those that exceed a limit."""

    def __init__(
        self,
        handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        count: Callable[[str, int], None],
        limits: Limits,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(
            handle,
            request_factory=_request_factory(limits, loop, count),
            handler_cancellation=True,
            keepalive_timeout=limits.idle_seconds,
            max_line_size=limits.header_bytes,
            max_field_size=limits.header_bytes,
            max_headers=limits.headers,
            access_log=None,
            logger=_unheard,
            # A small body must not become a large one.
            auto_decompress=False,
        )
        self._limits = limits
        self._clock = loop
        self._deadlines: dict[RequestHandler, asyncio.TimerHandle] = {}
        self._open: dict[RequestHandler, asyncio.Transport] = {}
        self._peer_of: dict[RequestHandler, str] = {}
        self._peers: Counter[str] = Counter()
        self._unproved: dict[RequestHandler, None] = {}  # the oldest first; connections without an accepted token
        self._unproved_of: dict[str, dict[RequestHandler, None]] = {}
        self._proved: set[RequestHandler] = set()

    def admit(self, handler: RequestHandler, transport: asyncio.Transport) -> bool:
        """Count a new connection. Return False if it was closed because there are too many."""
        peer = self._peer_of[handler] = _peer(transport)
        self._peers[peer] += 1
        self._make_room(peer)
        if len(self._open) >= self._limits.connections or self._peers[peer] > self._limits.connections_per_peer:
            transport.abort()
            return False
        self._open[handler] = transport
        self._unproved[handler] = None
        self._unproved_of.setdefault(peer, {})[handler] = None
        return True

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.allow(handler, self._limits.first_request_seconds)

    def _make_room(self, peer: str) -> None:
        of_peer = self._unproved_of.get(peer, {})
        if len(of_peer) >= self._limits.unproved_of_a_peer:
            self._cut_off(next(iter(of_peer)))
        full = len(self._open) >= self._limits.connections
        if self._unproved and (full or len(self._unproved) >= self._limits.unproved):
            self._cut_off(next(iter(self._unproved)))

    def _cut_off(self, handler: RequestHandler) -> None:
        self.spare(handler)
        deadline = self._deadlines.pop(handler, None)
        if deadline is not None:
            deadline.cancel()
        self._open.pop(handler).abort()

    def spare(self, handler: RequestHandler) -> None:
        """Protect the connection while a token on it is reviewed."""
        self._unproved.pop(handler, None)
        peer = self._peer_of.get(handler, "")
        of_peer = self._unproved_of.get(peer)
        if of_peer is not None:
            of_peer.pop(handler, None)
            if not of_peer:
                del self._unproved_of[peer]

    def prove(self, handler: RequestHandler) -> None:
        """Keep the connection, because a token on it was accepted."""
        self.spare(handler)
        if handler in self._peer_of:
            self._proved.add(handler)

    def proved(self, handler: RequestHandler) -> bool:
        """Return whether a token was accepted on the connection."""
        return handler in self._proved

    def forget(self, handler: RequestHandler) -> None:
        """Remove the closed connection."""
        deadline = self._deadlines.pop(handler, None)
        if deadline is not None:
            deadline.cancel()
        self.spare(handler)
        self._proved.discard(handler)
        self._open.pop(handler, None)
        peer = self._peer_of.pop(handler, None)
        if peer is not None:
            self._peers[peer] -= 1
            if self._peers[peer] <= 0:
                del self._peers[peer]

    def allow(self, handler: RequestHandler, seconds: float) -> None:
        """Close the connection after this time."""
        before = self._deadlines.pop(handler, None)
        if before is not None:
            before.cancel()
        if handler.transport is not None and handler in self._open:
            self._deadlines[handler] = self._clock.call_later(seconds, handler.transport.abort)


def _request_factory(
    limits: Limits, loop: asyncio.AbstractEventLoop, count: Callable[[str, int], None]
) -> Callable[..., web.BaseRequest]:
    def make(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        if message is ERROR:
            # aiohttp itself answers requests that it cannot parse.
            count("other", 400)
        most = limits.most_of_body(message.path)
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=most + 1)

    return make


def _peer(transport: asyncio.BaseTransport) -> str:
    name = transport.get_extra_info("peername")
    return str(name[0]) if name else ""
