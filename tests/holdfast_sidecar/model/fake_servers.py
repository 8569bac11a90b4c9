"""Real servers that fail on command: an operator over TLS with its own CA, and the testbed's metadata services."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from clocks import DEADLINE, Document, FakeClock, golden
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from holdfast_testbed.fakes.metadata import (
    AWS,
    AZURE,
    CLOUDS,
    GCP,
    NOTICE_SECONDS,
    PREEMPTION,
    AllClouds,
    Announcement,
    AzureMetadata,
    ComputeMetadata,
    Event,
    Imds,
    MetadataServer,
    Request,
)


class Authority:
    """A certificate authority of the test's own."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._sign(self._subject(f"{name} CA"), self._key.public_key(), authority=True)
        self.file = folder / f"{name}-ca.crt"
        self.file.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def server_context(self, address: str = "127.0.0.1") -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(self._subject(address), key.public_key(), address=address)
        file = self._folder / f"{self._name}-{address}.pem"
        file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        return context

    @staticmethod
    def _subject(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *, authority: bool = False, address: str = ""
    ) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject(f"{self._name} CA"))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if address:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())


class _Threaded(ThreadingMixIn, TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    owner: Any = None
    context: ssl.SSLContext | None = None

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.open: set[socket.socket] = set()
        self.stopped = False
        super().__init__(address, handler)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with contextlib.suppress(OSError):
            if self.context is not None:
                request = self.context.wrap_socket(request, server_side=True)
            self.open.add(request)
            if self.stopped:  # meanwhile; whoever adds later than that is not cut by it
                request.close()
                return
            super().process_request_thread(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients are killed and connections cut on purpose."""


class _Quiet(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Nothing."""

    def date_time_string(self, timestamp: float | None = None) -> str:
        skew = getattr(self.server.owner, "clock_ahead", 0.0)  # type: ignore[attr-defined]
        return super().date_time_string(time.time() + skew if timestamp is None else timestamp)

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if status != 204:
            self.wfile.write(body)


class ServerBase:
    """Starts, cuts and restarts a server on one port."""

    handler: type[BaseHTTPRequestHandler]

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.context = context
        self._server: _Threaded | None = None
        # Bound and never listening: while the server is stopped its port refuses, and nobody else is given it.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port = int(self._held.getsockname()[1])

    def start(self) -> None:
        self._server = _Threaded(("127.0.0.1", self.port), self.handler)
        self._server.owner = self
        self._server.context = self.context
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """As if its process were killed: the port refuses and every open connection ends."""
        if self._server is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._server.stopped = True
        for sock in list(self._server.open):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
        self._server = None

    def close(self) -> None:
        """Stop it for good."""
        self.stop()
        self._held.close()


class _OperatorHandler(_Quiet):
    def do_POST(self) -> None:
        operator: FakeOperator = self.server.owner  # type: ignore[attr-defined]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if operator.refuses(self):
            return
        if operator.hangs:
            operator.release.wait(DEADLINE)
        with operator.changed:
            operator.reports.append(body)
            answer = {"version": 1, "revision": operator.revision}
            operator.changed.notify_all()
        if operator.lose_answers:
            self.close_connection = True
            return
        self.answer(200, json.dumps(answer).encode())

    def do_GET(self) -> None:
        operator: FakeOperator = self.server.owner  # type: ignore[attr-defined]
        if operator.refuses(self):
            return
        after = int(self.path.partition("after=")[2])
        with operator.changed:
            operator.polls.append(after)
            operator.changed.wait_for(lambda: operator.revision > after, timeout=operator.hold)
            found = operator.document if operator.revision > after else None
        self.answer(204) if found is None else self.answer(200, found)


class FakeOperator(ServerBase):
    """The agents' API of `protocol.md`, with faults."""

    handler = _OperatorHandler

    def __init__(self, authority: Authority) -> None:
        super().__init__(authority.server_context())
        self.changed = threading.Condition()
        self.reports: list[Document] = []
        self.polls: list[int] = []
        self.tries: list[str] = []
        self.tokens = {"first-token"}
        self.seen_tokens: set[str] = set()
        self.document = b""
        self.revision = 0
        self.hold = 30.0
        self.status: int | None = None
        self.retry_after = ""
        self.leader = "https://other:8443"
        self.lose_answers = False
        self.hangs = False
        self.release = threading.Event()
        self.clock_ahead = 0.0

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def publish(self, data: bytes, revision: int) -> None:
        with self.changed:
            self.document, self.revision = data, revision
            self.changed.notify_all()

    def membership(self, revision: int, **changes: Any) -> bytes:
        """Publish the golden membership with another revision; returns its bytes."""
        data = json.dumps({**golden("membership.json"), "revision": revision, **changes}, indent=3).encode()
        self.publish(data, revision)
        return data

    def refuses(self, handler: _Quiet) -> bool:
        self.tries.append(handler.path)
        token = handler.headers.get("Authorization", "").removeprefix("Bearer ")
        self.seen_tokens.add(token)
        if token not in self.tokens:
            handler.answer(401, b"{}")
            return True
        if self.status is not None:
            body = json.dumps({"version": 1, "leader": self.leader}).encode()
            handler.answer(self.status, body, {"Retry-After": self.retry_after} if self.retry_after else None)
            return True
        return False

    def latest(self) -> Document:
        return self.reports[-1] if self.reports else {}


class FakeCloud:
    """A machine's metadata service, of whichever cloud it is asked as. Its clock may differ from the host's."""

    MACHINE = "gpt-node_1"

    def __init__(self, now: Callable[[], dt.datetime], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.skew = dt.timedelta()
        self.said = {cloud: Announcement(instance_id=self.MACHINE, cloud=cloud) for cloud in CLOUDS}
        self.aws = Imds(announced=lambda: self.said[AWS], clock=monotonic)
        self.gcp = ComputeMetadata(announced=lambda: self.said[GCP])
        self.azure = AzureMetadata(announced=lambda: self.said[AZURE], now=self.now)
        self.server = MetadataServer(AllClouds(self.aws, self.gcp, self.azure), now=self.now)

    def now(self) -> dt.datetime:
        """By the cloud's clock."""
        return self._now() + self.skew

    @property
    def url(self) -> str:
        return self.server.url

    def announce(self, cloud: str, kind: str = "", seconds: float | None = None, **more: Any) -> Event:
        """Announce something, its taking away a spot machine if nothing else is said."""
        self.said[cloud] = self.said[cloud].announce(
            kind or PREEMPTION[cloud],
            now=self.now(),
            seconds=NOTICE_SECONDS[cloud] if seconds is None else seconds,
            **more,
        )
        return self.said[cloud].events[-1]

    def withdraw(self, cloud: str) -> None:
        self.said[cloud] = self.said[cloud].withdraw()

    def asked(self, path: str, method: str = "GET") -> list[Request]:
        """The requests for a path so far."""
        return [request for request in list(self.server.seen) if (request.path, request.method) == (path, method)]

    def interrupt(self, action: str = "terminate") -> None:
        """AWS's notice of the golden report."""
        noon = FakeClock().start
        self.said[AWS] = self.said[AWS].announce(action, now=noon, seconds=120)

    def recommend(self) -> None:
        noon = FakeClock().start
        self.said[AWS] = self.said[AWS].announce("rebalance", now=noon - dt.timedelta(minutes=1), seconds=0)
