"""A metadata service on a socket: on nodes at the real address, in tests on loopback, with faults."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

FAULTS = ("garbage", "html", "redirect", "endless", "cut", "hang", "drip")
"""Faults of answers, in addition to status codes."""
ELSEWHERE = "/elsewhere"
"""The target of redirects, which answers every request of a client that follows them."""
_DRIP_SECONDS = 0.05
_KEPT = 4096


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request. Header names are in lower case."""

    method: str
    path: str
    query: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    closing: Callable[[], bool] = lambda: False
    """Whether the server stops, so that held answers must end."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Status, body and type of an answer."""

    status: int
    body: str = ""
    content_type: str = "text/plain"
    headers: dict[str, str] = field(default_factory=dict)


class Service(Protocol):
    """A cloud's service without its socket."""

    @property
    def name(self) -> str:
        """The value of the header `Server`."""
        ...

    def answer(self, request: Request) -> Answer: ...

    def refusal(self, request: Request, status: int) -> Answer:
        """Return an error response in the cloud's format."""
        ...


class MetadataServer:
    """Serves a service. `fault` (a status code or one of `FAULTS`) and the present result of `told` spoil each
    answer. `seen` has the last requests."""

    def __init__(
        self,
        service: Service,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        told: Callable[[], str] = lambda: "",
    ) -> None:
        self.service = service
        self._address = address
        self.now = now
        self._told = told
        self.port = port
        self.fault = ""
        self.seen: deque[Request] = deque(maxlen=_KEPT)
        self.closing = threading.Event()
        self._server: _Server | None = None
        self._held: socket.socket | None = None

    @property
    def url(self) -> str:
        """The URL, without a slash at the end."""
        return f"http://{self._address}:{self.port}"

    def spoiled(self) -> str:
        """Return the present fault."""
        return self.fault or self._told()

    def lasts(self, fault: str, seconds: float) -> bool:
        """Return whether the fault still exists after this time."""
        return not self.closing.wait(seconds) and self.spoiled() == fault

    def start(self) -> None:
        """Answer in the background; after `stop`, at the same port again."""
        self.closing.clear()
        if self._held is None:
            # Bound and never listening: while the server is stopped, no other process gets its port.
            self._held = socket.socket()
            self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held.bind((self._address, self.port))
            self.port = self._held.getsockname()[1]
        self._server = _Server((self._address, self.port), self)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), name="metadata", daemon=True).start()

    def stop(self) -> None:
        """Stop as if the process were killed: the port refuses connections, and every open one ends."""
        if self._server is not None:
            self.closing.set()
            self._server.shutdown()
            self._server.server_close()
            self._server.cut()
            self._server = None

    def __enter__(self) -> MetadataServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._held is not None:
            self._held.close()
            self._held = None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], metadata: MetadataServer) -> None:
        self.metadata = metadata
        self._open: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without http.server's look-up of the host's name, which may hang without DNS."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.discard(request)

    def cut(self) -> None:
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: connections end on purpose."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        metadata, request = self.server.metadata, self._request()
        metadata.seen.append(request)
        astray = request.path.startswith(ELSEWHERE)
        fault = "" if astray else metadata.spoiled()
        if not fault:
            answer = metadata.service.answer(_led_back(request))
            fault = "" if astray else metadata.spoiled()  # the fault may have begun while the answer was held
        if not fault:
            self._reply(answer)
        elif fault.isdigit():
            self._reply(metadata.service.refusal(request, int(fault)))
        else:
            _spoil(self, metadata, fault)
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815 - the base class's names

    def _request(self) -> Request:
        parts = urlsplit(self.path)
        return Request(
            method=self.command,
            path=parts.path,
            query=dict(parse_qsl(parts.query)),
            headers={name.lower(): value for name, value in self.headers.items()},
            body=self.rfile.read(int(self.headers.get("Content-Length") or 0)),
            closing=self.server.metadata.closing.is_set,
        )

    def _reply(self, answer: Answer) -> None:
        body = answer.body.encode()
        self.send_response(answer.status)
        for name, value in {"Content-Type": answer.content_type, **answer.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return self.server.metadata.service.name

    def date_time_string(self, timestamp: float | None = None) -> str:
        """Return the cloud's time, which may differ from the host's."""
        return format_datetime(self.server.metadata.now().astimezone(UTC), usegmt=True)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Log nothing: there is a poll every few seconds."""


def _led_back(request: Request) -> Request:
    """Return the original path of a redirected request."""
    return replace(request, path=request.path.removeprefix(ELSEWHERE))


def _spoil(handler: BaseHTTPRequestHandler, server: MetadataServer, fault: str) -> None:
    """Answer with a fault, and close the connection."""
    if fault == "garbage":
        handler.wfile.write(b"\x00\xff this is not HTTP \r\n\r\n" * 10)
    elif fault == "hang":
        while server.lasts(fault, _DRIP_SECONDS):
            pass
    elif fault == "drip":
        for letter in b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nX-Slow: " + b"x" * 1000:
            handler.wfile.write(bytes([letter]))
            if not server.lasts(fault, _DRIP_SECONDS):
                break
    else:
        _mislead(handler, server, fault)


def _mislead(handler: BaseHTTPRequestHandler, server: MetadataServer, fault: str) -> None:
    """Return a wrong answer that is valid HTTP."""
    status, length, body = 200, -1, b""
    if fault == "html":
        body = b"<html>log in to the network</html>"
    elif fault == "endless":
        body = b"x" * (1 << 20)
    elif fault == "cut":
        length, body = 100, b'{"action": "terminate", '
    elif fault == "redirect":
        status = 302
    handler.send_response(status)
    if status == 302:
        handler.send_header("Location", server.url + ELSEWHERE + handler.path)
    handler.send_header("Content-Length", str(length if length >= 0 else len(body)))
    handler.end_headers()
    handler.wfile.write(body)
