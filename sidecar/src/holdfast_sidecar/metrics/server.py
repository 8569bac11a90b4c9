"""`/metrics`, `/healthz`, `/readyz` over plain HTTP, for Prometheus and the kubelet. No request changes anything."""

import http
import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler

from prometheus_client import CONTENT_TYPE_LATEST

from holdfast_sidecar import __version__
from holdfast_sidecar import constants as c

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Page:
    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Pages = dict[str, Callable[[], Page]]


def metrics_page(render: Callable[[], bytes]) -> Callable[[], Page]:
    return lambda: Page(status=200, body=render(), content_type=CONTENT_TYPE_LATEST)


def probe_page(problems: Callable[[], list[str]]) -> Callable[[], Page]:
    """Return 200 without problems, else 503 with one problem per line."""

    def page() -> Page:
        found = problems()
        return Page(status=503 if found else 200, body=("\n".join(found or ["ok"]) + "\n").encode())

    return page


class _Handler(BaseHTTPRequestHandler):
    server_version = f"holdfast-sidecar/{__version__}"
    sys_version = ""
    timeout = c.SCRAPE_TIMEOUT_SECONDS
    server: "Server"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        make = self.server.pages.get(self.path.partition("?")[0])
        page = make() if make else Page(status=http.HTTPStatus.NOT_FOUND, body=b"not found\n")
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.end_headers()
        if with_body:
            self.wfile.write(page.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Scrapes are not logged."""


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves a few connections at once and refuses others, so that no scraper can fill the pod's memory."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 16

    def __init__(self, address: str, port: int, pages: Pages) -> None:
        self.pages = pages
        self._free = threading.BoundedSemaphore(c.MAX_SCRAPES)
        both = not address and socket.has_dualstack_ipv6()
        self.address_family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
        self._both = both
        super().__init__((address, port), _Handler)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.server_address[1])

    def server_bind(self) -> None:
        if self._both:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def process_request(self, request: object, client_address: object) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)  # type: ignore[arg-type]
            return
        try:
            super().process_request(request, client_address)  # type: ignore[arg-type]
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Log errors, except for a connection that the scraper closed."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            _log.warning("a request to the metrics port failed", exc_info=True)
