"""``/healthz``, ``/readyz`` and ``/metrics`` on plain HTTP, in a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

logger = logging.getLogger(__name__)

Checks = Mapping[str, Callable[[], bool]]
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# The limit for a connection, from its start to the last byte of the response.
_REQUEST_SECONDS = 5.0
_CONCURRENT = 32
_ROOM_SECONDS = 0.2


class HealthServer:
    """Answers probes and scrapes. If a named check returns False or raises, its page reports a failure."""

    def __init__(
        self,
        metrics: Callable[[], bytes],
        *,
        live: Checks,
        ready: Checks,
        host: str = "",
        port: int = 8080,
    ) -> None:
        pages: dict[str, Callable[[], tuple[int, str, bytes]]] = {
            "/healthz": lambda: _judge(live),
            "/readyz": lambda: _judge(ready),
            "/metrics": lambda: (200, _METRICS_TYPE, metrics()),
        }
        self._server = _Server(host, port, pages)
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)
        self.port: int = self._server.server_address[1]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(5.0)
        self._server.server_close()


def _judge(checks: Checks) -> tuple[int, str, bytes]:
    failed = sorted(name for name, check in checks.items() if not _holds(name, check))
    text = "ok\n" if not failed else "".join(f"{name}: failed\n" for name in failed)
    return 503 if failed else 200, "text/plain; charset=utf-8", text.encode()


def _holds(name: str, check: Callable[[], bool]) -> bool:
    try:
        return check()
    except Exception:
        logger.exception("check %s raised", name)
        return False


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, pages: Mapping[str, Callable[[], tuple[int, str, bytes]]]) -> None:
        self.pages = pages
        self._free = threading.BoundedSemaphore(_CONCURRENT)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}  # the oldest first, each with its start time
        if not host and socket.has_dualstack_ipv6():
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without http.server's look-up of the host's name, which can hang."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "holdfast-operator", self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Use one of a bounded number of threads. If all are busy, close the oldest connection."""
        if not self._free.acquire(blocking=False):
            self._cut(most=1)
            if not self._free.acquire(timeout=_ROOM_SECONDS):
                self.shutdown_request(request)
                return
        with self._lock:
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close connections whose time is over, twice per second and after each new connection."""
        self._cut(before=time.monotonic() - _REQUEST_SECONDS)

    def shutdown_request(self, request: Any) -> None:
        """Close the connection and forget it, because its number may belong to another connection afterwards."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def _cut(self, *, most: int = _CONCURRENT, before: float = float("inf")) -> None:
        """Shut down the oldest connections from before that time: their threads read an end of file."""
        with self._lock:
            for request in [known for known, came in self._open.items() if came < before][:most]:
                del self._open[request]
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that closed the connection."""
        logger.debug("a probe's connection ended early")


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_SECONDS
    server: _Server

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        status, kind, body = page() if page else (404, "text/plain; charset=utf-8", b"not found\n")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log no probes."""
