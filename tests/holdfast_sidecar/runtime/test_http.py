"""Requests against servers that misbehave byte by byte: each ends by its deadline, within its memory."""

from __future__ import annotations

import contextlib
import gzip
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import DeadlineError, TooLargeError, TransportError
from holdfast_sidecar.operator_api.client import ReloadingTlsContext
from holdfast_sidecar.runtime.http import Connection, Response

PATIENCE = 240.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

Talk = Callable[[socket.socket], None]


class RawServer:
    """Calls one function for each connection, in turn; the last one again and again."""

    def __init__(self, *talks: Talk, context: ssl.SSLContext | None = None) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self._talks = talks
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        scheme = "https" if context else "http"
        self.url = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                talk = self._talks[min(self.connections, len(self._talks) - 1)]
                self.connections += 1
                threading.Thread(target=self._talk, args=(sock, talk), daemon=True).start()

    def _talk(self, sock: socket.socket, talk: Talk) -> None:
        with contextlib.suppress(OSError):
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_side=True)
            with sock:
                talk(sock)

    def heard(self, sock: socket.socket) -> bytes:
        """The next request of a connection."""
        request = b""
        while b"\r\n\r\n" not in request:
            part = sock.recv(65536)
            if not part:
                raise OSError("the client is gone")
            request += part
        self.requests.append(request)
        return request

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., RawServer]]:
    """Starts a server; a function of it and a socket stands for each connection."""
    with contextlib.ExitStack() as stack:

        def start(*talks: Callable[[RawServer, socket.socket], None], context: Any = None) -> RawServer:
            server = RawServer(*(lambda sock, talk=talk: talk(server, sock) for talk in talks), context=context)
            stack.callback(server.close)
            return server

        yield start


def answering(*answers: bytes) -> Callable[[RawServer, socket.socket], None]:
    """One of these for each request of a connection, which then ends."""

    def talk(server: RawServer, sock: socket.socket) -> None:
        for answer in answers:
            server.heard(sock)
            sock.sendall(answer)

    return talk


def dripping(start: bytes, drop: bytes, seconds: float = 0.02) -> Callable[[RawServer, socket.socket], None]:
    """These bytes at once, and then one drop after the other without an end."""

    def talk(server: RawServer, sock: socket.socket) -> None:
        server.heard(sock)
        sock.sendall(start)
        while True:
            sock.sendall(drop)
            time.sleep(seconds)

    return talk


def connection(server: RawServer, **more: Any) -> Connection:
    return Connection(server.url, time.monotonic, **more)


def get(link: Connection, path: str = "/x", timeout: float = PATIENCE) -> Response:
    return link.request("GET", path, headers={}, body=None, timeout=timeout)


DRIPS = {
    "the status": (b"HTTP/1.1 200 ", b"O"),
    "a header": (b"HTTP/1.1 200 OK\r\nX: ", b"y"),
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "the body": (b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n", b"z"),
    "a body without an end": (b"HTTP/1.1 200 OK\r\n\r\n", b"z"),
    "a chunk's size": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0"),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nz\r\n"),
    "trailers": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"A: b\r\n"),
    "a redirect's body": (b"HTTP/1.1 302 Found\r\nLocation: /y\r\nContent-Length: 9999\r\n\r\n", b"z"),
}


@pytest.mark.parametrize("what", DRIPS)
def test_a_server_that_drips_exceeds_no_deadline(serve, what):
    link = connection(serve(dripping(*DRIPS[what])))
    began = time.monotonic()
    with pytest.raises(DeadlineError):
        get(link, timeout=0.4)
    assert 0.3 < time.monotonic() - began < PATIENCE / 2


@pytest.mark.parametrize("what", ["the status", "the body"])
def test_nor_over_tls(serve, authority, what):
    server = serve(dripping(*DRIPS[what]), context=authority.server_context())
    link = connection(server, context=ReloadingTlsContext(authority.file))
    with pytest.raises(DeadlineError):
        get(link, timeout=1.0)


def test_a_server_that_reads_nothing_exceeds_no_deadline(serve):
    link = connection(serve(lambda _server, _sock: time.sleep(PATIENCE)))
    with pytest.raises(DeadlineError):
        link.request("POST", "/x", headers={}, body=bytes(64 << 20), timeout=0.4)


def test_a_tls_handshake_that_hangs_exceeds_no_deadline(serve, authority):
    server = serve(lambda _server, _sock: time.sleep(PATIENCE))
    link = Connection(
        server.url.replace("http:", "https:"), time.monotonic, context=ReloadingTlsContext(authority.file)
    )
    with pytest.raises(DeadlineError):
        get(link, timeout=0.4)


@pytest.mark.parametrize(("named", "accepted"), [("127.0.0.9", True), ("127.0.0.1", False)])
def test_leader_is_verified_by_the_operators_name(serve, authority, named, accepted):
    """Its address is not in the certificate."""
    server = serve(answering(OK), context=authority.server_context(named))
    link = Connection("https://127.0.0.9:1", time.monotonic, context=ReloadingTlsContext(authority.file))
    link.switch_to(("127.0.0.1", urlsplit(server.url).port))
    with contextlib.nullcontext() if accepted else pytest.raises(TransportError, match="not valid for"):
        get(link)


def test_a_deadline_that_has_passed_sends_nothing(serve):
    server = serve(answering(OK))
    with pytest.raises(DeadlineError):
        get(connection(server), timeout=0.0)
    assert server.connections == 0


ENDLESS = {
    "a length": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
    "no length": b"HTTP/1.1 200 OK\r\n\r\n",
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"fffffff\r\n",
    "a redirect": b"HTTP/1.1 302 Found\r\nLocation: /y\r\n\r\n",
    "an error": b"HTTP/1.1 500 No\r\n\r\n",
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_large_body_is_refused_at_the_limit(serve, what):
    link = connection(serve(dripping(ENDLESS[what], bytes(64 << 10), seconds=0)), max_bytes=1 << 20)
    with pytest.raises(TooLargeError, match="larger than 1048576 bytes"):
        get(link)


@pytest.mark.parametrize("size", [0, 1, 1 << 20])
def test_a_body_up_to_the_limit_is_whole(serve, size):
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode()
    link = connection(serve(answering(head + bytes(size))), max_bytes=1 << 20)
    assert get(link).body == bytes(size)


GARBAGE = {
    "no http": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "nothing": b"",
    "a length that is none": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok",
    "a chunk that is none": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a chunk cut short": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nok",
    "a long line": b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\n\r\nok",
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\nok",
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_is_an_error_of_the_transport(serve, what):
    server = serve(answering(GARBAGE[what]))
    with pytest.raises(TransportError):
        get(connection(server))
    assert server.connections == 1


def test_a_redirect_is_an_answer_and_is_not_followed(serve):
    server = serve(answering(b"HTTP/1.1 302 Found\r\nLocation: /y\r\nContent-Length: 0\r\n\r\n", OK))
    answer = get(connection(server))
    assert (answer.status, answer.headers["location"]) == (302, "/y")
    assert len(server.requests) == 1


def test_a_body_is_taken_as_it_was_sent(serve):
    packed = gzip.compress(bytes(1 << 20))
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n".encode()
    server = serve(answering(head + packed))
    assert get(connection(server)).body == packed
    assert b"Accept-Encoding: identity" in server.requests[0]


def test_one_connection_serves_many_requests(serve):
    server = serve(answering(OK, OK, b"HTTP/1.1 204 No Content\r\n\r\n", OK))
    link = connection(server)
    assert [get(link).status for _ in range(4)] == [200, 200, 204, 200]
    assert server.connections == 1


def test_a_kept_connection_that_was_closed_is_opened_again(serve):
    server = serve(answering(OK), answering(OK))
    link = connection(server)
    assert [get(link).body, get(link).body] == [b"ok", b"ok"]
    assert server.connections == 2


def test_a_kept_connection_closed_at_the_request_costs_nothing(serve):
    server = serve(answering(OK, b""), answering(OK))
    link = connection(server)
    assert [get(link).body, get(link).body] == [b"ok", b"ok"]
    assert (server.connections, len(server.requests)) == (2, 3)


def test_an_error_leaves_the_next_request_a_new_connection(serve):
    server = serve(answering(GARBAGE["no http"]), dripping(*DRIPS["the body"]), answering(OK))
    link = connection(server)
    with pytest.raises(TransportError):
        get(link)
    with pytest.raises(DeadlineError):
        get(link, timeout=0.2)
    assert get(link).body == b"ok"


def test_another_thread_ends_a_request(serve, wait):
    server = serve(dripping(*DRIPS["the body"]))
    link = connection(server)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            get(link)
        except TransportError as error:
            errors.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    wait(lambda: server.requests, "the request")
    link.abort()
    asking.join(PATIENCE)
    assert len(errors) == 1


def test_no_proxy_and_no_netrc_of_the_environment_counts(serve, monkeypatch, tmp_path: Path):
    server = serve(answering(OK))
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", os.fspath(tmp_path / "netrc"))
    assert get(connection(server)).body == b"ok"
    assert b"authorization" not in server.requests[0].lower()


def test_cookies_are_neither_kept_nor_sent(serve):
    cookie = b"HTTP/1.1 200 OK\r\nSet-Cookie: a=b; Path=/\r\nContent-Length: 2\r\n\r\nok"
    server = serve(answering(cookie, OK))
    link = connection(server)
    get(link)
    get(link)
    assert b"cookie" not in server.requests[1].lower()


def test_only_the_given_authority_is_trusted(serve, authority, authority_named):
    """`requests` brings public authorities of its own, and they count for nothing."""
    trust = ReloadingTlsContext(authority.file)
    good = serve(answering(OK), context=authority.server_context())
    assert get(connection(good, context=trust)).body == b"ok"
    assert len(trust().get_ca_certs()) == 1
    foreign = serve(answering(OK), context=authority_named("second").server_context())
    with pytest.raises(TransportError, match="certificate refused"):
        get(connection(foreign, context=trust))


def test_a_new_bundle_ends_the_connection_of_the_old_one(serve, authority, tmp_path: Path):
    bundle = tmp_path / "bundle.crt"
    bundle.write_bytes(authority.file.read_bytes())
    server = serve(answering(OK, OK), context=authority.server_context())
    link = connection(server, context=ReloadingTlsContext(bundle))
    get(link)
    get(link)
    bundle.write_bytes(authority.file.read_bytes() + b"\n")
    get(link)
    assert server.connections == 2


def test_a_request_is_sent_as_it_was_given(serve):
    server = serve(answering(OK))
    link = Connection(f"{server.url}/base", time.monotonic)
    link.request("PUT", "/token?a=b", headers={"X-Name": "value"}, body=None, timeout=PATIENCE)
    head = server.requests[0].decode()
    assert head.startswith("PUT /base/token?a=b HTTP/1.1\r\n")
    assert "X-Name: value\r\n" in head
    assert "Content-Length: 0\r\n" in head


def test_an_ipv6_address_is_reached():
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listener:

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(65536)
                sock.sendall(OK)

        threading.Thread(target=answer, daemon=True).start()
        link = Connection(f"http://[::1]:{listener.getsockname()[1]}", time.monotonic)
        assert get(link).body == b"ok"


def test_a_host_that_answers_no_connection_is_left_soon(serve, monkeypatch):
    monkeypatch.setattr(c, "CONNECT_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        with socket.create_connection(address):
            link = Connection(f"http://127.0.0.1:{address[1]}", time.monotonic)
            with pytest.raises(DeadlineError):
                get(link, timeout=PATIENCE)
