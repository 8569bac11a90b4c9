"""HTTP to one host through `requests`: every request ends by a deadline, and every answer has a limit.

The timeouts of `requests` hold for each `recv`, so a server that drips bytes could hold a thread for ever. The
sockets here know the deadline of the request, and give each `recv` only what is left of it.
"""

import contextlib
import functools
import http.client
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection

from holdfast_sidecar import __version__
from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import DeadlineError, TooLargeError, TransportError

Monotonic = Callable[[], float]

_ERRORS: Final = (OSError, ValueError, urllib3.exceptions.HTTPError)
"""What `requests` and `urllib3` raise."""
_CLOSED: Final = (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError, ssl.SSLEOFError)
"""How a kept connection fails that the other side has closed."""
_HEADERS: Final = {"User-Agent": f"holdfast-sidecar/{__version__}", "Accept-Encoding": "identity"}
_SOCKET_OPTIONS: Final = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # A peer that lost its power says no goodbye.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, c.KEEPALIVE_IDLE_SECONDS),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, c.KEEPALIVE_INTERVAL_SECONDS),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, c.KEEPALIVE_COUNT),
]


@dataclass(frozen=True, kw_only=True)
class Response:
    """A complete answer. Redirects are not followed: no service that the sidecar asks has any."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Transport(Protocol):
    """Sends one request and brings the answer, or raises `TransportError` by its deadline."""

    def request(
        self, method: str, path: str, *, headers: Mapping[str, str], body: bytes | None, timeout: float
    ) -> Response:
        """`headers` of the response have lower-case names."""
        ...


class _Exchange:
    """The request in flight: its deadline and its socket."""

    def __init__(self, monotonic: Monotonic) -> None:
        self._monotonic = monotonic
        self.deadline = 0.0
        self.socket: socket.socket | None = None
        self.connects = 0
        """How often a connection was opened so far."""

    def left(self) -> float:
        left = self.deadline - self._monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left


class _Socket(socket.socket):
    exchange: _Exchange

    def recv_into(self, *args: Any) -> int:
        self.settimeout(self.exchange.left())
        return super().recv_into(*args)

    def sendall(self, *args: Any) -> None:
        self.settimeout(self.exchange.left())
        super().sendall(*args)


class _TlsSocket(ssl.SSLSocket):
    exchange: _Exchange

    def recv_into(self, *args: Any) -> int:
        self.settimeout(self.exchange.left())
        return super().recv_into(*args)

    def send(self, *args: Any) -> int:  # `sendall` calls it for each part
        self.settimeout(self.exchange.left())
        return super().send(*args)


class _Connection(HTTPConnection):
    def __init__(self, *args: Any, exchange: _Exchange, **more: Any) -> None:
        super().__init__(*args, **more)
        self._exchange = exchange

    def connect(self) -> None:
        super().connect()
        cast(_Socket | _TlsSocket, self.sock).exchange = self._exchange
        self._exchange.socket = self.sock

    def _new_conn(self) -> socket.socket:
        self._exchange.connects += 1
        opened = _Socket(fileno=super()._new_conn().detach())
        opened.settimeout(self._exchange.left())  # the TLS handshake has more time than the TCP one
        return opened


class _TlsConnection(_Connection, HTTPSConnection):
    pass


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


class _Adapter(HTTPAdapter):
    """Sends all requests through one pool. `requests` would choose a pool by URL, and trust public authorities.

    Requests go to the adapter without a `requests.Session`. A session costs CPU. What a session adds must not happen
    here: proxies and `.netrc` of the environment, cookies and redirects.
    """

    pool: urllib3.HTTPConnectionPool

    def get_connection_with_tls_context(self, *_args: Any, **_more: Any) -> urllib3.HTTPConnectionPool:
        return self.pool

    def cert_verify(self, *_args: Any, **_more: Any) -> None:
        """The pool has its TLS context."""


class Connection:
    """One connection to one host, opened when needed and again after any error.

    `context` is asked at each request; a new one (certificates rotate) ends the connection that the old one made.
    One thread sends requests; any other may `abort` the one in flight.
    """

    def __init__(
        self,
        url: str,
        monotonic: Monotonic,
        *,
        context: Callable[[], ssl.SSLContext] | None = None,
        max_bytes: int = c.MAX_RESPONSE_BYTES,
    ) -> None:
        parts = urlsplit(url)
        self._home = (parts.hostname or "", parts.port or (443 if context else 80))
        self._address = self._home
        self._prefix = parts.path.rstrip("/")
        self._monotonic = monotonic
        self._context = context
        self._used_context: ssl.SSLContext | None = None
        self._max_bytes = max_bytes
        self._exchange = _Exchange(monotonic)
        self._adapter = _Adapter()
        self._adapter.pool = self._new_pool()
        self._aborted = False

    def request(
        self, method: str, path: str, *, headers: Mapping[str, str], body: bytes | None, timeout: float
    ) -> Response:
        """Send a request, and again if a kept connection fails: the other side may have closed it long ago."""
        self._exchange.deadline = self._monotonic() + timeout
        if self._context is not None and (context := self._context()) is not self._used_context:
            self._used_context = context
            self._start_over()
        connects, self._aborted = self._exchange.connects, False
        try:
            return self._send(method, path, headers, body)
        except _ERRORS as error:
            kept = self._exchange.connects == connects
            if not kept or self._aborted or not isinstance(_cause(error), _CLOSED):
                raise _translated(error) from error
        try:
            return self._send(method, path, headers, body)
        except _ERRORS as error:
            raise _translated(error) from error

    def switch_to(self, address: tuple[str, int] | None) -> bool:
        """Send the next requests to this address, or with None to the one that was given at first; whether that is
        another one than before."""
        wanted = address or self._home
        if wanted == self._address:
            return False
        self._address = wanted
        self._start_over()
        return True

    def abort(self) -> None:
        """End the request in flight from another thread: it raises `TransportError`."""
        self._aborted = True
        if (sock := self._exchange.socket) is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _send(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None) -> Response:
        left = self._exchange.left()
        host, port = self._address
        name = f"[{host}]" if ":" in host else host
        url = f"{'http' if self._context is None else 'https'}://{name}:{port}{self._prefix}{path}"
        request = _prepared(method, url).copy()
        request.headers.update(headers)
        request.prepare_body(body, None)
        timeouts = (min(left, c.CONNECT_SECONDS), left)
        with self._adapter.send(request, stream=True, timeout=timeouts) as answer:
            names = {name.lower(): value for name, value in answer.headers.items()}
            return Response(status=answer.status_code, headers=names, body=self._read(answer))

    def _read(self, answer: requests.Response) -> bytes:
        body = answer.raw.read(self._max_bytes + 1, decode_content=False)
        if len(body) > self._max_bytes:
            raise TooLargeError(f"the answer is larger than {self._max_bytes} bytes")
        if answer.raw.length_remaining:  # a body that ends early is no error when it is read by amount
            raise TransportError(f"the answer was cut short by {answer.raw.length_remaining} bytes")
        return bytes(body)

    def _start_over(self) -> None:
        self._adapter.pool.close()
        self._adapter.pool = self._new_pool()

    def _new_pool(self) -> urllib3.HTTPConnectionPool:
        host, port = self._address
        options: dict[str, Any] = {"socket_options": _SOCKET_OPTIONS, "exchange": self._exchange}
        if self._used_context is None:
            return _Pool(host, port, **options)
        self._used_context.sslsocket_class = _TlsSocket
        # The certificate names the operator, not each replica's address.
        return _TlsPool(host, port, ssl_context=self._used_context, server_hostname=self._home[0], **options)


@functools.lru_cache(maxsize=32)
def _prepared(method: str, url: str) -> requests.PreparedRequest:
    """A request to copy: `requests` takes long to check a URL, and most are asked for again and again."""
    return requests.Request(method, url, headers=_HEADERS).prepare()


def _cause(error: BaseException) -> BaseException:
    """The first error, out of those that `requests` and `urllib3` put around it."""
    inner = error.__cause__ or next((part for part in error.args if isinstance(part, BaseException)), None)
    return error if inner is None else _cause(inner)


def _translated(error: Exception) -> TransportError:
    cause = _cause(error)
    if isinstance(cause, TimeoutError):
        return DeadlineError("no complete answer in time")
    if isinstance(cause, ssl.SSLCertVerificationError):
        return TransportError(f"certificate refused: {cause.verify_message}")
    return TransportError(f"{type(cause).__name__}: {str(cause)[:200]}")
