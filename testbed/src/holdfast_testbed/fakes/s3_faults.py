"""A proxy on loopback in front of an S3 server that injects faults into requests according to a plan.

```python
with faults(server.url, lambda request: Answer(status=503, code="SlowDown") if request.number < 3 else None) as proxy:
    boto3.client("s3", endpoint_url=proxy.url, …)
```
Requests are forwarded unchanged, so that signatures stay valid. A connection is used for one request.
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

_READ: Final = 1 << 16
_END_OF_HEAD: Final = b"\r\n\r\n"
_SILENT_SECONDS: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request. Numbers start at 1; header names are in lower case."""

    number: int
    method: str
    target: str
    nbytes: int
    headers: Mapping[str, str] = field(repr=False)

    @property
    def is_part(self) -> bool:
        """Whether the request uploads a part of a large object."""
        return self.method == "PUT" and "partNumber=" in self.target


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An error response instead of the server's."""

    status: int
    code: str


@dataclass(frozen=True, kw_only=True)
class Reset:
    """A reset of the connection: after part of the body, or with `answer_lost` when the server has finished."""

    after_bytes: int = 0
    answer_lost: bool = False


@dataclass(frozen=True, kw_only=True)
class Delay:
    """The delay after the request was received."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class Flip:
    """A changed byte in the request's body, or with `answer` in the response's body."""

    at: int
    answer: bool = False


Fault = Answer | Reset | Delay | Flip
Plan = Callable[[Request], Fault | None]


@dataclass
class Proxy:
    """The running proxy, which counts requests. Its plan may be changed at any time."""

    url: str
    plan: Plan
    seen: list[Request] = field(default_factory=list)

    def heal(self) -> None:
        """Forward every request from now on."""
        self.plan = lambda _: None


@contextmanager
def faults(upstream: str, plan: Plan = lambda _: None) -> Iterator[Proxy]:
    """Start a proxy in front of a server's URL."""
    place = urlsplit(upstream)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = Proxy(url=f"http://127.0.0.1:{listener.getsockname()[1]}", plan=plan)
        numbers = itertools.count(1)
        target = (str(place.hostname), int(place.port or 80))

        def accept() -> None:
            with suppress(OSError):  # the listener is closed
                while True:
                    client, _ = listener.accept()
                    threading.Thread(target=_serve, args=(client, target, proxy, numbers), daemon=True).start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield proxy
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join(_SILENT_SECONDS)


def _serve(client: socket.socket, target: tuple[str, int], proxy: Proxy, numbers: Iterator[int]) -> None:
    client.settimeout(_SILENT_SECONDS)
    with client, suppress(OSError):
        head, rest = _head(client)
        if head:
            lines = head.split("\r\n")
            request, expects = _request(lines, next(numbers))
            proxy.seen.append(request)
            if expects:
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            kept = [line for line in lines if line.partition(":")[0].lower() not in ("connection", "expect")]
            passed_on = "\r\n".join([*kept, "Connection: close", "", ""]).encode("latin-1")
            _play(client, request, proxy.plan(request), rest, lambda body: _ask(target, passed_on + body))


def _request(lines: list[str], number: int) -> tuple[Request, bool]:
    method, path, _ = lines[0].split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    nbytes = int(headers.get("content-length", 0))
    request = Request(number=number, method=method, target=path, nbytes=nbytes, headers=headers)
    return request, "expect" in headers


def _play(
    client: socket.socket, request: Request, fault: Fault | None, begun: bytes, ask: Callable[[bytearray], bytearray]
) -> None:
    if isinstance(fault, Reset) and not fault.answer_lost:
        _body(client, begun, min(fault.after_bytes, request.nbytes))
        _reset(client)
        return
    body = _body(client, begun, request.nbytes)
    if isinstance(fault, Delay):
        time.sleep(fault.seconds)
    if isinstance(fault, Answer):
        client.sendall(_refusal(request, fault))
        return
    if isinstance(fault, Flip) and not fault.answer:
        body[fault.at] ^= 1
    answer = ask(body)
    if isinstance(fault, Flip) and fault.answer:
        answer[answer.index(_END_OF_HEAD) + len(_END_OF_HEAD) + fault.at] ^= 1
    if isinstance(fault, Reset):
        _reset(client)
    else:
        client.sendall(answer)


def _head(client: socket.socket) -> tuple[str, bytes]:
    data = b""
    while _END_OF_HEAD not in data:
        more = client.recv(_READ)
        if not more:
            return "", b""
        data += more
    head, _, rest = data.partition(_END_OF_HEAD)
    return head.decode("latin-1"), rest


def _body(client: socket.socket, begun: bytes, nbytes: int) -> bytearray:
    body = bytearray(begun)
    while len(body) < nbytes:
        more = client.recv(min(_READ, nbytes - len(body)))
        if not more:
            raise ConnectionError("the client went away")
        body += more
    return body


def _ask(target: tuple[str, int], request: bytes) -> bytearray:
    answer = bytearray()
    with socket.create_connection(target, timeout=_SILENT_SECONDS) as server:
        server.sendall(request)
        while more := server.recv(_READ):
            answer += more
    return answer


def _reset(client: socket.socket) -> None:
    """Close the connection with RST, as a middlebox does."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _refusal(request: Request, fault: Answer) -> bytes:
    body = f'<?xml version="1.0"?><Error><Code>{fault.code}</Code><Message>by plan</Message></Error>'.encode()
    head = f"HTTP/1.1 {fault.status} By plan\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    shown = b"" if request.method == "HEAD" else body
    return f"{head}Content-Length: {len(shown)}\r\n\r\n".encode() + shown
