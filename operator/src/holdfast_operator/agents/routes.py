"""The routes of the agents' API and of Alertmanager's webhook."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from holdfast_operator.agents.connections import ConnectionLimiter
from holdfast_operator.agents.fair_turns import Turns
from holdfast_operator.agents.limits import ALERTS_PATH, Limits
from holdfast_operator.api.names import PROTOCOL_VERSION
from holdfast_operator.cluster.agent_hub import AgentHub, PodIdentity
from holdfast_operator.errors import AgentRequestError, AuthenticationUnavailableError, TooManyRequestsError
from holdfast_operator.runtime.rate_limit import Rates

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerMetrics:
    """Counters that the server increments."""

    answered: Callable[[str, int], None] = lambda _route, _code: None
    polls: Callable[[int], None] = lambda _held: None


class AlertReceiver(Protocol):
    def allowed(self, token: str) -> bool:
        """Return whether the sender of this token may post alerts."""

    def receive(self, raw: bytes) -> Future[None]:
        """Take one body; done once its consequences are written. Raises ``AgentRequestError``."""


_Review = asyncio.Task[PodIdentity | None]


class AgentRoutes:
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
        self.bodies: Counter[str] = Counter()  # bodies that are being read, by pod
        self.held = 0
        self.reviews: dict[str, _Review] = {}
        self._renewals = asyncio.Semaphore(limits.renewals)
        self._asking: Counter[str] = Counter()  # unknown tokens under review, by address
        self._turns: dict[str, asyncio.Semaphore] = {}  # limits the reviews, by address
        self.guard = ConnectionLimiter(self.handle, self.count, limits, self._loop)
        hub.listen(self._call_wake)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Handle one request, from its complete head to the answer."""
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
            # Unauthenticated clients keep no connection.
            response.force_close()
        self.guard.allow(request.protocol, self._limits.idle_seconds)
        self.count(route, response.status)
        return response

    def count(self, route: str, status: int) -> None:
        self._observer.answered(route if route in _ROUTES else "other", status)

    async def _route(self, request: web.BaseRequest) -> web.Response:
        if request.path not in _PATHS:
            raise AgentRequestError(404, "no such path")
        if f"{request.method} {request.path}" not in _ROUTES:
            raise AgentRequestError(405, "no such method here")
        standby, leader = self._hub.standby()
        if standby:
            response = _json(503, {"leader": leader})
            # A client that keeps its connection, as Alertmanager does, would never reach the leader.
            response.force_close()
            return response
        if request.path == ALERTS_PATH:
            return await self._alerted(request)
        try:
            identity = await self._identity(request)
        except AuthenticationUnavailableError:
            return _json(503, {"leader": None})
        self.guard.prove(request.protocol)
        # This check comes before anything of the body is read.
        seconds = self._rates.take(f"{request.method} {identity.pod_uid}", self._loop.time())
        if seconds:
            raise TooManyRequestsError(seconds)
        if request.method == "POST":
            return await self._report(request, identity)
        return await self._membership(request, identity)

    async def _alerted(self, request: web.BaseRequest) -> web.Response:
        """Handle Alertmanager's webhook. The body is read only after the token was verified."""
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
            # Other requests wait for the same review, so a request that ends must not cancel it.
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(carried_out)), self._limits.alerts_seconds)
        except TimeoutError:
            raise AgentRequestError(503, "the decision about the alerts is not stored yet: send them again") from None
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
                # The known result is used meanwhile. The next request repeats a review that failed.
                self._start_review(token, self._renewals)
            return known
        review = self.reviews.get(token) or self._first_review(token, request.remote or "")
        self.guard.spare(request.protocol)
        # A request that ends cancels no review, because other requests may wait for it.
        identity = await asyncio.shield(review)
        if identity is None:
            raise AgentRequestError(401, "the token is not valid here")
        return identity

    def _first_review(self, token: str, peer: str) -> _Review:
        """Review an unknown token. Many tokens from one address do not block those of others."""
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
        """Start the review of this token. There is one review per token at a time."""

        async def ask() -> PodIdentity | None:
            async with turn:
                return await self._loop.run_in_executor(self._threads, self._hub.authenticate, token)

        review = self.reviews[token] = self._loop.create_task(ask())
        review.add_done_callback(lambda _: self._reviewed(token))
        return review

    def _reviewed(self, token: str) -> None:
        review = self.reviews.pop(token)
        if not review.cancelled():
            review.exception()  # read the error even if no request waits for the review

    async def _report(self, request: web.BaseRequest, identity: PodIdentity) -> web.Response:
        uid = identity.pod_uid
        announced = request.content_length
        if announced is not None:
            self._charge(uid, min(announced, self._limits.body_bytes))
        if self.bodies[uid] >= self._limits.bodies_of_a_pod:
            raise TooManyRequestsError(1)
        self.bodies[uid] += 1
        try:
            raw = await self._body(request, self._limits.body_bytes)
        finally:
            self.bodies[uid] -= 1
            if not self.bodies[uid]:
                del self.bodies[uid]
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
            # No client is left to read this answer, but it is counted.
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
        """Hold a poll. Return False if its time is over, or if the pod polls on another connection."""
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


_PATHS = frozenset({"/v1/report", "/v1/membership", ALERTS_PATH})
_ROUTES = frozenset({"POST /v1/report", "GET /v1/membership", f"POST {ALERTS_PATH}"})


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
