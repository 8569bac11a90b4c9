"""The agents' API and Alertmanager's webhook over HTTPS, in a thread with its own event loop.

It lives outside kopf's loop on purpose: a failed watch ends kopf, and training must not hear of it. Every limit
is in ``Limits``: a client that is slow, silent or greedy loses its connection and costs nobody else anything.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import threading
from asyncio import sslproto
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from aiohttp import web
from aiohttp.web_protocol import ERROR, RequestHandler

from holdfast_operator.agents.turns import Turns
from holdfast_operator.api.names import PROTOCOL_VERSION
from holdfast_operator.cluster.agent_hub import AgentHub, PodIdentity
from holdfast_operator.errors import AgentRequestError, AuthenticationUnavailableError, TooManyRequestsError
from holdfast_operator.runtime.rate_limit import RateLimit, Rates

logger = logging.getLogger(__name__)
# aiohttp logs requests that it cannot parse with a piece of them, which may be of a token, as often as they come.
_unheard = logging.getLogger(f"{__name__}.http")
_unheard.disabled = True

# A connection's read buffer. The standard 256 KiB, zeroed and so resident, would make held polls cost 0.3 MiB each.
_TLS_BUFFER_BYTES = 16 * 1024
# Of one connection, whatever it does: TLS, HTTP and buffers.
CONNECTION_BYTES = 50 * 1024
# Of the process's memory limit. 512 MiB are 100 for the interpreter, a quarter for jobs and about as much for lists.
_CONNECTIONS_SHARE = 3 / 8
_FEWEST_CONNECTIONS = 500


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one server grants its clients."""

    # A worker of 1,024 that has lost all others tells some 200 KiB.
    body_bytes: int = 256 * 1024
    bodies_of_a_pod: int = 4
    alerts_bytes: int = 8 * 1024 * 1024
    alert_bodies: int = 1
    alerts_seconds: float = 10.0
    """Until what follows from alerts has to be written, or their sender is told to try again."""
    header_bytes: int = 8190
    headers: int = 32
    token_bytes: int = 8000
    connections: int = 20_000
    connections_per_peer: int = 2_000
    unproved: int = 1_000
    """Connections on which no token was accepted yet, also in their TLS handshake: a further one ends the oldest."""
    unproved_of_a_peer: int = 64
    hold_seconds: float = 30.0
    first_request_seconds: float = 10.0
    idle_seconds: float = 75.0
    body_seconds: float = 10.0
    handshake_seconds: float = 10.0
    authentications: int = 16
    authentications_waiting: int = 1_000
    authentications_waiting_of_a_peer: int = 250
    # Of the questions that are asked at once: neither one address nor what is known already takes them all.
    authentications_of_a_peer: int = 4
    renewals: int = 12
    of_a_pod: RateLimit = field(default_factory=lambda: RateLimit(a_second=10.0, at_once=50))
    """Of its reports, and of its polls. A sidecar needs one a second, and some more when much happens."""
    bytes_of_a_pod: RateLimit = field(default_factory=lambda: RateLimit(a_second=256 * 1024.0, at_once=1024 * 1024))
    """Of its reports: the largest once a second."""
    report_bytes_at_once: int = 16 * 1024
    """Larger reports are read in a thread, in turns: the event loop serves everybody meanwhile."""

    @classmethod
    def within(cls, memory_bytes: int | None) -> Limits:
        """The limits of a process with so much memory (None: not limited), most of which is for other things."""
        most = cls()
        if memory_bytes is None:
            return most
        share = int(memory_bytes * _CONNECTIONS_SHARE) // CONNECTION_BYTES
        connections = min(most.connections, max(share, _FEWEST_CONNECTIONS))
        unproved = min(most.unproved, connections // 4)
        return replace(most, connections=connections, unproved=unproved)

    @property
    def request_seconds(self) -> float:
        """Longest that one request may keep its connection without an answer taken."""
        return self.hold_seconds + 20.0


@dataclass(frozen=True, kw_only=True)
class ServerMetrics:
    """Counters that the server feeds."""

    answered: Callable[[str, int], None] = lambda _route, _code: None
    polls: Callable[[int], None] = lambda _held: None


class AlertReceiver(Protocol):
    """Takes Alertmanager's notifications."""

    def allowed(self, token: str) -> bool:
        """Return whether the sender of this token may post alerts."""

    def receive(self, raw: bytes) -> Future[None]:
        """Take one body; done once its consequences are written. Raises ``AgentRequestError``."""


class AgentServer:
    """Serves an ``AgentHub``. ``start`` returns once it listens; ``stop`` once its thread has ended."""

    def __init__(
        self,
        hub: AgentHub,
        context: ssl.SSLContext,
        *,
        host: str | None = None,
        port: int = 8443,
        limits: Limits | None = None,
        observer: ServerMetrics | None = None,
        alerts: AlertReceiver | None = None,
    ) -> None:
        self._hub = hub
        self._alerts = alerts
        self._context = context
        self._host, self._port = host, port
        self._limits = limits or Limits()
        self._observer = observer or ServerMetrics()
        self._thread = threading.Thread(target=self._run, name="agents-api", daemon=True)
        self._listening = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._site: _AgentRoutes | None = None
        self.port = port

    @property
    def polls_held(self) -> int:
        """Long polls held now."""
        return self._site.held if self._site is not None else 0

    @property
    def reviews_waiting(self) -> int:
        """Tokens whose review is under way."""
        return len(self._site.reviews) if self._site is not None else 0

    def start(self, seconds: float = 30.0) -> None:
        """Listen. Raises what kept it from listening."""
        self._thread.start()
        if not self._listening.wait(seconds):
            raise TimeoutError("the agents' API did not start to listen in time")
        if self._failure is not None:
            raise self._failure

    def stop(self, seconds: float = 10.0) -> None:
        """End all connections and the thread."""
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stopping.set)
        self._thread.join(seconds)

    def alive(self) -> bool:
        """Whether the server's thread still serves."""
        return self._thread.is_alive() and self._failure is None

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            self._failure = error
            logger.exception("the agents' API ended")
        finally:
            self._hub.listen(None)
            self._listening.set()

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        with (
            ThreadPoolExecutor(self._limits.authentications, thread_name_prefix="token-review") as threads,
            ThreadPoolExecutor(1, thread_name_prefix="large-reports") as reader,
        ):
            self._site = site = _AgentRoutes(
                self._hub, self._limits, self._observer, threads=threads, reader=reader, alerts=self._alerts
            )
            listener = await self._loop.create_server(
                lambda: _Tls(site.guard, self._context, self._limits), self._host, self._port, backlog=1024
            )
            self.port = listener.sockets[0].getsockname()[1]
            self._listening.set()
            await self._stopping.wait()
            listener.close()
            await site.guard.shutdown(1.0)


class _Tls(sslproto.SSLProtocol):
    """One connection, counted from its start: asyncio's own servers report it after its TLS handshake only."""

    max_size = _TLS_BUFFER_BYTES

    def __init__(self, guard: _ConnectionLimiter, context: ssl.SSLContext, limits: Limits) -> None:
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


class _ConnectionLimiter(web.Server):
    """Counts connections and ends those that keep us waiting."""

    def __init__(self, site: _AgentRoutes, limits: Limits, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            site.handle,
            request_factory=_request_factory(limits, loop, site.count),
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
        self._unproved: dict[RequestHandler, None] = {}  # the oldest first
        self._unproved_of: dict[str, dict[RequestHandler, None]] = {}
        self._proved: set[RequestHandler] = set()

    def admit(self, handler: RequestHandler, transport: asyncio.Transport) -> bool:
        """Count a connection that begins. False: it was cut off, since there are too many."""
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
        """A token was shown on it and is looked at: it is not cut off for others meanwhile."""
        self._unproved.pop(handler, None)
        peer = self._peer_of.get(handler, "")
        of_peer = self._unproved_of.get(peer)
        if of_peer is not None:
            of_peer.pop(handler, None)
            if not of_peer:
                del self._unproved_of[peer]

    def prove(self, handler: RequestHandler) -> None:
        """A token was accepted on it: it may be kept."""
        self.spare(handler)
        if handler in self._peer_of:
            self._proved.add(handler)

    def proved(self, handler: RequestHandler) -> bool:
        """Whether a token was accepted on it."""
        return handler in self._proved

    def forget(self, handler: RequestHandler) -> None:
        """The connection is gone, whatever it had come to."""
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
        """From now on the connection has this long before it is cut."""
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
            # What cannot be parsed is answered by aiohttp itself.
            count("other", 400)
        most = limits.alerts_bytes if message.path == _ALERTS else limits.body_bytes
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=most + 1)

    return make


def _peer(transport: asyncio.BaseTransport) -> str:
    name = transport.get_extra_info("peername")
    return str(name[0]) if name else ""


_Review = asyncio.Task[PodIdentity | None]


class _AgentRoutes:
    """The routes. Runs in the server's loop only."""

    def __init__(
        self,
        hub: AgentHub,
        limits: Limits,
        observer: ServerMetrics,
        *,
        threads: ThreadPoolExecutor,
        reader: ThreadPoolExecutor,
        alerts: AlertReceiver | None,
    ) -> None:
        self._hub = hub
        self._alerts = alerts
        self._alert_bodies = asyncio.Semaphore(limits.alert_bodies)
        self._limits = limits
        self._observer = observer
        self._threads = threads
        self._reader = reader
        self._turns_to_read = Turns()
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, dict[str, asyncio.Future[bool]]] = {}
        self._rates = Rates(limits.of_a_pod)
        self._bytes = Rates(limits.bytes_of_a_pod)
        self._bodies: Counter[str] = Counter()  # that are being read, by pod
        self.held = 0
        self.reviews: dict[str, _Review] = {}
        self._renewals = asyncio.Semaphore(limits.renewals)
        self._asking: Counter[str] = Counter()  # tokens that are not known, by the address that showed them
        self._turns: dict[str, asyncio.Semaphore] = {}  # of the same
        self.guard = _ConnectionLimiter(self, limits, self._loop)
        hub.listen(self._call_wake)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request, from its complete head to the answer."""
        self.guard.allow(request.protocol, self._limits.request_seconds)
        route = f"{request.method} {request.path}"
        try:
            response = await self._route(request)
        except TooManyRequestsError as error:
            response = _json(error.status, {"error": str(error)})
            response.headers["Retry-After"] = str(error.seconds)
        except AgentRequestError as error:
            response = _json(error.status, {"error": str(error)})
        except Exception:
            logger.exception("an agent's request could not be served")
            response = _json(500, {"error": "the operator failed to serve this request"})
        if response.status == 401 or not self.guard.proved(request.protocol):
            # Strangers keep no connection.
            response.force_close()
        self.guard.allow(request.protocol, self._limits.idle_seconds)
        self.count(route, response.status)
        return response

    def count(self, route: str, status: int) -> None:
        """One answer was given."""
        self._observer.answered(route if route in _ROUTES else "other", status)

    async def _route(self, request: web.BaseRequest) -> web.Response:
        if request.path not in _PATHS:
            raise AgentRequestError(404, "no such path")
        if f"{request.method} {request.path}" not in _ROUTES:
            raise AgentRequestError(405, "no such method here")
        standby, leader = self._hub.standby()
        if standby:
            response = _json(503, {"leader": leader})
            # Who keeps the connection, as Alertmanager does, would come back here and never to the leader.
            response.force_close()
            return response
        if request.path == _ALERTS:
            return await self._alerted(request)
        try:
            identity = await self._identity(request)
        except AuthenticationUnavailableError:
            return _json(503, {"leader": None})
        self.guard.prove(request.protocol)
        # Before anything of the body is read.
        seconds = self._rates.take(f"{request.method} {identity.pod_uid}", self._loop.time())
        if seconds:
            raise TooManyRequestsError(seconds)
        if request.method == "POST":
            return await self._report(request, identity)
        return await self._membership(request, identity)

    async def _alerted(self, request: web.BaseRequest) -> web.Response:
        """Alertmanager's webhook. Nothing is read of a body before its sender has shown the token."""
        inbox = self._alerts
        if inbox is None:
            raise AgentRequestError(404, "no token is set for alerts here")
        if not inbox.allowed(self._token(request)):
            raise AgentRequestError(401, "the token is not valid here")
        self.guard.prove(request.protocol)
        async with self._alert_bodies:
            raw = await self._body(request, self._limits.alerts_bytes)
            carried_out = await self._loop.run_in_executor(self._threads, inbox.receive, raw)
        try:
            # Others wait for the same answer: who gives up must not cancel it.
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(carried_out)), self._limits.alerts_seconds)
        except TimeoutError:
            raise AgentRequestError(503, "what follows from the alerts is not written yet: tell them again") from None
        return _json(200, {})

    def _token(self, request: web.BaseRequest) -> str:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        token = token.strip()
        usable = token.isascii() and 0 < len(token) <= self._limits.token_bytes
        if scheme.lower() != "bearer" or not usable:
            raise AgentRequestError(401, "a bearer token is needed")
        return token

    async def _identity(self, request: web.BaseRequest) -> PodIdentity:
        token = self._token(request)
        known = self._hub.recall(token)
        if known is not None:
            if self._hub.due(token) and token not in self.reviews:
                # What is known serves meanwhile; one that fails is asked for again with the next request.
                self._start_review(token, self._renewals)
            return known
        review = self.reviews.get(token) or self._first_review(token, request.remote or "")
        self.guard.spare(request.protocol)
        # Who goes away ends no question that others wait for as well.
        identity = await asyncio.shield(review)
        if identity is None:
            raise AgentRequestError(401, "the token is not valid here")
        return identity

    def _first_review(self, token: str, peer: str) -> _Review:
        """Of a token that is not known. However many come from one address, others get their turn."""
        waiting = self._asking[peer]
        most_of_peer = self._limits.authentications_waiting_of_a_peer
        if waiting >= most_of_peer or len(self.reviews) >= self._limits.authentications_waiting:
            raise AuthenticationUnavailableError("too many tokens wait to be reviewed")
        turn = self._turns.setdefault(peer, asyncio.Semaphore(self._limits.authentications_of_a_peer))
        self._asking[peer] = waiting + 1
        review = self._start_review(token, turn)
        review.add_done_callback(lambda _: self._forget_asker(peer))
        return review

    def _forget_asker(self, peer: str) -> None:
        self._asking[peer] -= 1
        if not self._asking[peer]:
            del self._asking[peer], self._turns[peer]

    def _start_review(self, token: str, turn: asyncio.Semaphore) -> _Review:
        """The answer to come about this token, of which there is one question at a time."""

        async def ask() -> PodIdentity | None:
            async with turn:
                return await self._loop.run_in_executor(self._threads, self._hub.authenticate, token)

        review = self.reviews[token] = self._loop.create_task(ask())
        review.add_done_callback(lambda _: self._reviewed(token))
        return review

    def _reviewed(self, token: str) -> None:
        review = self.reviews.pop(token)
        if not review.cancelled():
            review.exception()  # perhaps nobody waits for it

    async def _report(self, request: web.BaseRequest, identity: PodIdentity) -> web.Response:
        uid = identity.pod_uid
        announced = request.content_length
        if announced is not None:
            self._charge(uid, min(announced, self._limits.body_bytes))
        if self._bodies[uid] >= self._limits.bodies_of_a_pod:
            raise TooManyRequestsError(1)
        self._bodies[uid] += 1
        try:
            raw = await self._body(request, self._limits.body_bytes)
        finally:
            self._bodies[uid] -= 1
            if not self._bodies[uid]:
                del self._bodies[uid]
        if announced is None:
            self._charge(uid, len(raw))
        revision = await self._record(identity, raw)
        peers = self._hub.peers_of(identity.pod_uid)
        return _json(200, {"revision": revision, **({} if peers is None else {"peers": peers})})

    def _charge(self, pod_uid: str, size: int) -> None:
        seconds = self._bytes.take(pod_uid, self._loop.time(), float(size))
        if seconds:
            raise TooManyRequestsError(seconds)

    async def _record(self, identity: PodIdentity, raw: bytes) -> int:
        if len(raw) <= self._limits.report_bytes_at_once:
            return self._hub.record(identity, raw)
        job = self._hub.job_of(identity.pod_uid) or ""
        async with self._turns_to_read.of(identity.namespace, job):
            return await self._loop.run_in_executor(self._reader, self._hub.record, identity, raw)

    async def _body(self, request: web.BaseRequest, most: int) -> bytes:
        if (request.content_length or 0) > most:
            raise AgentRequestError(413, f"a body is at most {most} bytes here")
        try:
            return await asyncio.wait_for(request.read(), self._limits.body_seconds)
        except web.HTTPRequestEntityTooLarge as error:
            raise AgentRequestError(413, f"a body is at most {most} bytes here") from error
        except TimeoutError as error:
            raise AgentRequestError(408, "the body did not arrive in time") from error
        except ConnectionError as error:
            # Nobody is left to read this; it is counted.
            raise AgentRequestError(400, "the sender left before its body had arrived") from error

    async def _membership(self, request: web.BaseRequest, identity: PodIdentity) -> web.Response:
        after = _after(request)
        deadline = self._loop.time() + self._limits.hold_seconds
        while True:
            job_uid = self._hub.job_of(identity.pod_uid)
            if job_uid is None:
                raise AgentRequestError(404, "this pod belongs to no job")
            publication = self._hub.publication(job_uid)
            if publication is not None and publication.revision > after:
                return web.Response(body=publication.payload, content_type="application/json")
            if not await self._woken(job_uid, identity.pod_uid, deadline):
                return web.Response(status=204)

    async def _woken(self, job_uid: str, pod_uid: str, deadline: float) -> bool:
        """Hold a poll. False: its time is over, or the same pod asks anew on another connection."""
        waiter: asyncio.Future[bool] = self._loop.create_future()
        pods = self._waiting.setdefault(job_uid, {})
        elder = pods.get(pod_uid)
        if elder is not None and not elder.done():
            elder.set_result(False)
        pods[pod_uid] = waiter
        timer = self._loop.call_at(deadline, _settle, waiter, False)
        self._count(+1)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._count(-1)
            if pods.get(pod_uid) is waiter:
                del pods[pod_uid]
            if not pods and self._waiting.get(job_uid) is pods:
                del self._waiting[job_uid]

    def _call_wake(self, job_uid: str) -> None:
        self._loop.call_soon_threadsafe(self._wake, job_uid)

    def _wake(self, job_uid: str) -> None:
        for waiter in self._waiting.get(job_uid, {}).values():
            _settle(waiter, True)

    def _count(self, change: int) -> None:
        self.held += change
        self._observer.polls(self.held)


_ALERTS = "/v1/alerts"
_PATHS = frozenset({"/v1/report", "/v1/membership", _ALERTS})
_ROUTES = frozenset({"POST /v1/report", "GET /v1/membership", f"POST {_ALERTS}"})


def _settle(waiter: asyncio.Future[bool], value: bool) -> None:
    if not waiter.done():
        waiter.set_result(value)


def _after(request: web.BaseRequest) -> int:
    text = request.query.get("after", "0")
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise AgentRequestError(400, "after is not a revision")
    return int(text)


def _json(status: int, content: dict[str, Any]) -> web.Response:
    body = json.dumps({"version": PROTOCOL_VERSION, **content}, separators=(",", ":")).encode()
    return web.Response(status=status, body=body, content_type="application/json")
