"""A kept-alive HTTP connection whose every request ends by a deadline, whatever the other side does.

The standard library's timeouts hold for each `recv`, so a server that drips bytes could hold a thread for ever.
Here each `recv` gets only what is left of the request's own time.
"""

import contextlib
import http.client
import io
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import DeadlineError, TooLargeError, TransportError

Monotonic = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Response:
    """A complete answer. Redirects are not followed: neither service that we talk to has any."""

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


class _DeadlineReader(io.RawIOBase):
    """Reads a socket with what is left of the deadline."""

    def __init__(self, sock: "_DeadlineSocket") -> None:
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._sock.receive(buffer)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._sock.read_to_the_end()


class _DeadlineSocket:
    """What `http.client` needs of a socket, bounded by a deadline that each request sets."""

    def __init__(self, sock: socket.socket, monotonic: Monotonic) -> None:
        self.raw = sock
        self._monotonic = monotonic
        self.deadline = 0.0
        self._readers = 0
        self._closing = False

    def _arm(self) -> None:
        left = self.deadline - self._monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.raw.settimeout(left)

    def receive(self, buffer: Any) -> int:
        self._arm()
        return self.raw.recv_into(buffer)

    def sendall(self, data: bytes) -> None:
        self._arm()
        self.raw.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        self._readers += 1
        return io.BufferedReader(_DeadlineReader(self))

    def close(self) -> None:
        """`http.client` closes the socket of an answer that ends the connection before it reads the answer."""
        self._closing = True
        self._close_unread()

    def read_to_the_end(self) -> None:
        """A reader is closed."""
        self._readers -= 1
        self._close_unread()

    def _close_unread(self) -> None:
        if self._closing and not self._readers:
            self.raw.close()


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
        self._host, self._port = self._home
        self._prefix = parts.path.rstrip("/")
        self._monotonic = monotonic
        self._context = context
        self._used_context: ssl.SSLContext | None = None
        self._max_bytes = max_bytes
        self._http: http.client.HTTPConnection | None = None
        self._sock: _DeadlineSocket | None = None
        self._aborted = False

    def request(
        self, method: str, path: str, *, headers: Mapping[str, str], body: bytes | None, timeout: float
    ) -> Response:
        """Send a request, and again if a kept connection fails: the other side may have closed it long ago."""
        deadline = self._monotonic() + timeout
        if self._context is not None and (context := self._context()) is not self._used_context:
            self.close()
            self._used_context = context
        kept, self._aborted = self._http is not None, False
        try:
            return self._exchange(method, path, headers, body, deadline)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError, ssl.SSLEOFError) as error:
            if not kept or self._aborted:
                raise TransportError(_describe(error)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _translated(error) from error
        try:
            return self._exchange(method, path, headers, body, deadline)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _translated(error) from error

    def turn(self, address: tuple[str, int] | None) -> bool:
        """Send the next requests to this address, or with None to the one that was given at first; whether that is
        another one than before."""
        wanted = address or self._home
        if wanted == (self._host, self._port):
            return False
        self.close()
        self._host, self._port = wanted
        return True

    def abort(self) -> None:
        """End the request in flight from another thread: it raises `TransportError`."""
        self._aborted = True
        if (sock := self._sock) is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock.raw, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._http is not None:
            self._http.close()
        if self._sock is not None:
            self._sock.raw.close()
        self._http = self._sock = None

    def _exchange(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, deadline: float
    ) -> Response:
        try:
            connection = self._http or self._open(deadline)
            if self._sock is not None:
                self._sock.deadline = deadline
            connection.request(method, self._prefix + path, body=body, headers=dict(headers))
            answer = connection.getresponse()
            data = answer.read(self._max_bytes + 1)
            if len(data) > self._max_bytes:
                raise TooLargeError(f"the answer is larger than {self._max_bytes} bytes")
            if answer.length:  # http.client says nothing of a body that ends early when it is read by amount
                raise TransportError(f"the answer was cut short by {answer.length} bytes")
            if answer.will_close:
                self.close()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Response(status=answer.status, headers=names, body=data)
        except BaseException:
            self.close()
            raise

    def _open(self, deadline: float) -> http.client.HTTPConnection:
        left = max(deadline - self._monotonic(), 0.001)
        raw = socket.create_connection((self._host, self._port), timeout=min(left, c.CONNECT_SECONDS))
        try:
            _watch(raw)
            if self._used_context is not None:
                raw.settimeout(max(deadline - self._monotonic(), 0.001))
                raw = self._used_context.wrap_socket(raw, server_hostname=self._host)
        except BaseException:
            raw.close()
            raise
        self._sock = _DeadlineSocket(raw, self._monotonic)
        self._http = http.client.HTTPConnection(self._host, self._port)
        self._http.auto_open = 0
        self._http.sock = self._sock
        return self._http


def _watch(sock: socket.socket) -> None:
    """Notice a peer that lost its power, which says no goodbye."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, c.KEEPALIVE_IDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, c.KEEPALIVE_INTERVAL_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, c.KEEPALIVE_COUNT)


def _translated(error: Exception) -> TransportError:
    if isinstance(error, TimeoutError):
        return DeadlineError("no complete answer in time")
    return TransportError(_describe(error))


def _describe(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate refused: {error.verify_message}"
    return f"{type(error).__name__}: {str(error)[:200]}"
