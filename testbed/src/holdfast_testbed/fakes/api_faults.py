"""A proxy on loopback in front of an API server that is slow, unavailable or silent, or without watches, for one
client.

```python
with api_faults(server, authority) as proxy:
    proxy.kubeconfig(own, path)   # plain HTTP on this side, a token as the user
    proxy.become(Mode.SILENT)
```
Watches are forwarded line by line. A silent proxy holds back data, and delivers it when it forwards again.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import yaml

_UPSTREAM_SECONDS: Final = 400.0
_LOOK_SECONDS: Final = 0.02
_HOP_BY_HOP: Final = frozenset({"connection", "transfer-encoding", "content-length", "keep-alive", "host"})
_GONE: Final = {
    "type": "ERROR",
    "object": {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": "too old resource version",
        "reason": "Expired",
        "code": 410,
    },
}


class Mode(Enum):
    """The proxy's handling of requests."""

    PASSING = "requests pass"
    AWAY = "connections are reset, as by a host without a server"
    SILENT = "no packet passes in either direction, as in a network partition"


class ApiProxy:
    """The running proxy. ``delay_seconds`` is the time before a request is forwarded.

    ``on_answer`` is called with method, path and answer of each request except watches, before the client receives
    it.
    """

    def __init__(self, server: str, authority: Path) -> None:
        place = urlsplit(server)
        self.upstream = (str(place.hostname), int(place.port or 443))
        self.context = ssl.create_default_context(cafile=authority)
        self.delay_seconds = 0.0
        self.on_answer: Callable[[str, str, bytes], None] = lambda _method, _path, _data: None
        self.deaf = False
        self.mode = Mode.PASSING
        self.requests = 0
        self._lock = threading.Lock()
        self._clients: set[socket.socket] = set()
        self._watches: set[_Handler] = set()
        self._listener = _Listener(("127.0.0.1", 0), self)
        self.url = f"http://127.0.0.1:{self._listener.server_address[1]}"

    def kubeconfig(self, own: Path, path: Path) -> Path:
        """Write to ``path`` a copy of the kubeconfig ``own`` whose server is the proxy."""
        config = yaml.safe_load(own.read_text())
        config["clusters"][0]["cluster"]["server"] = self.url
        path.write_text(yaml.safe_dump(config))
        return path

    def become(self, mode: Mode) -> None:
        """Change the mode.

        A change to an unreachable server, or from a silent one, resets open connections.
        """
        before, self.mode = self.mode, mode
        if mode is Mode.AWAY or before is Mode.SILENT:
            self.reset()

    def expire_watches(self) -> None:
        """End each open watch with 410. The next watch works again."""
        with self._lock:
            watches = tuple(self._watches)
        self.deaf = False
        for watch in watches:
            watch.expire()

    def reset(self) -> None:
        with self._lock:
            clients = tuple(self._clients)
        for client in clients:
            with suppress(OSError):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.shutdown(socket.SHUT_RDWR)

    def admit(self) -> bool:
        """Wait as the mode requires. Return whether to forward the request."""
        while self.mode is Mode.SILENT:
            time.sleep(_LOOK_SECONDS)
        if self.mode is Mode.AWAY:
            return False
        self.requests += 1
        time.sleep(self.delay_seconds)
        return True

    def joined(self, client: socket.socket) -> None:
        """Record that a client's connection is open."""
        with self._lock:
            self._clients.add(client)

    def left(self, client: socket.socket) -> None:
        """Record that the connection is closed."""
        with self._lock:
            self._clients.discard(client)

    def watches(self, handler: _Handler) -> None:
        """Record that this connection forwards a watch."""
        with self._lock:
            self._watches.add(handler)

    def ended(self, handler: _Handler) -> None:
        """Record that its watch ended."""
        with self._lock:
            self._watches.discard(handler)

    def serve(self) -> None:
        """Serve until `close`."""
        self._listener.serve_forever(poll_interval=_LOOK_SECONDS)

    def close(self) -> None:
        """End the server and all open connections."""
        self._listener.shutdown()
        self._listener.server_close()
        self.mode = Mode.AWAY
        self.reset()


@contextmanager
def api_faults(server: str, authority: Path) -> Iterator[ApiProxy]:
    """Start a proxy in front of this address, whose certificate that authority signed."""
    proxy = ApiProxy(server, authority)
    thread = threading.Thread(target=proxy.serve, name="api-faults", daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.close()
        thread.join()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], proxy: ApiProxy) -> None:
        self.proxy = proxy
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log nothing: connections are broken on purpose."""


class _Handler(BaseHTTPRequestHandler):
    """One client's connection, and the proxy's connection to the API server."""

    protocol_version = "HTTP/1.1"
    server: _Listener

    def setup(self) -> None:
        """Open a connection."""
        super().setup()
        self._upstream: http.client.HTTPSConnection | None = None
        self._writes = threading.Lock()
        self._expired = False
        self.server.proxy.joined(self.connection)

    def finish(self) -> None:
        """Close the connection."""
        self.server.proxy.left(self.connection)
        if self._upstream is not None:
            self._upstream.close()
        with suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Log nothing."""

    def expire(self) -> None:
        """Send the watch an error that its version is too old, and end it."""
        with self._writes, suppress(OSError):
            self._expired = True
            self._chunk(json.dumps(_GONE).encode() + b"\n")
            self.wfile.write(b"0\r\n\r\n")
            self.connection.shutdown(socket.SHUT_RDWR)

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self.server.proxy.admit():
            self._break()
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
        try:
            answer = self._ask(body, headers)
        except (OSError, http.client.HTTPException):
            self._break()
            return
        if "watch=true" in self.path or "watch=True" in self.path:
            self._stream(answer)
        else:
            data = answer.read()
            self.server.proxy.on_answer(self.command, self.path, data)
            self._answer(answer, data)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass  # noqa: N815 - the base class's names

    def _ask(self, body: bytes, headers: dict[str, str]) -> http.client.HTTPResponse:
        if self._upstream is None:
            host, port = self.server.proxy.upstream
            context = self.server.proxy.context
            self._upstream = http.client.HTTPSConnection(host, port, timeout=_UPSTREAM_SECONDS, context=context)
        self._upstream.request(self.command, self.path, body=body or None, headers=headers)
        return self._upstream.getresponse()

    def _answer(self, answer: http.client.HTTPResponse, data: bytes) -> None:
        while self.server.proxy.mode is Mode.SILENT:
            time.sleep(_LOOK_SECONDS)
        self._head(answer)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, answer: http.client.HTTPResponse) -> None:
        proxy = self.server.proxy
        self._head(answer)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        proxy.watches(self)
        try:
            while line := answer.readline():
                with self._writes:
                    if self._expired:
                        break
                    if not proxy.deaf and proxy.mode is Mode.PASSING:
                        self._chunk(line)
            with self._writes:
                if not self._expired:
                    self.wfile.write(b"0\r\n\r\n")
        finally:
            proxy.ended(self)
            self.close_connection = True

    def _head(self, answer: http.client.HTTPResponse) -> None:
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in {*_HOP_BY_HOP, "date", "server"}:
                self.send_header(name, value)

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _break(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
