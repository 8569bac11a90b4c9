"""A cloud instance's metadata service: AWS's IMDSv2, as far as interruptions need it.

Stateless but for the tokens: what is announced stands in a small JSON file that is read at each request, so that
another process can write it. See "Use IMDSv2" and "Spot interruption notices" in AWS's user guide.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN_PATH = "/latest/api/token"  # noqa: S105
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105
MAX_TTL_SECONDS = 21600
_ROOT = "/latest/meta-data"


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """What the cloud has announced for an instance: nothing, a rebalance recommendation, or an interruption."""

    instance_id: str
    action: str | None = None
    action_time: str | None = None
    rebalance_time: str | None = None

    def write(self, path: Path) -> None:
        """Publish it, whole or not at all."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(vars(self)) + "\n")
        temporary.rename(path)

    @classmethod
    def read(cls, path: Path) -> Announcement:
        """What stands in the file now."""
        return cls(**json.loads(path.read_text()))


def interruption(instance_id: str, *, action: str, seconds: float, now: datetime) -> Announcement:
    """The instance will be stopped or terminated `seconds` from now; AWS recommends a rebalance with it."""
    return Announcement(
        instance_id=instance_id,
        action=action,
        action_time=_stamp(now + timedelta(seconds=seconds)),
        rebalance_time=_stamp(now),
    )


def rebalance(instance_id: str, *, now: datetime) -> Announcement:
    """The instance is at an elevated risk of interruption."""
    return Announcement(instance_id=instance_id, rebalance_time=_stamp(now))


def _stamp(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Status, body and type of an answer."""

    status: int
    body: str = ""
    content_type: str = "text/plain"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Imds:
    """The service without its socket: requests in, answers out. Tokens live as long as the instance runs."""

    announced: Callable[[], Announcement]
    clock: Callable[[], float] = time.monotonic
    _tokens: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, path: str, headers: dict[str, str]) -> Answer:
        """`PUT /latest/api/token` gives a session token; nothing else may be put."""
        lowered = {name.lower(): value for name, value in headers.items()}
        if path != TOKEN_PATH:
            return Answer(status=405)
        if "x-forwarded-for" in lowered:
            return Answer(status=403)
        ttl = lowered.get(TTL_HEADER.lower(), "")
        if not (ttl.isascii() and ttl.isdigit() and 1 <= int(ttl) <= MAX_TTL_SECONDS):
            return Answer(status=400, body="Bad Request")
        token = secrets.token_urlsafe(40)
        with self._lock:
            self._tokens[token] = self.clock() + int(ttl)
        return Answer(status=200, body=token, headers={TTL_HEADER: ttl})

    def get(self, path: str, headers: dict[str, str]) -> Answer:
        """Metadata, for those who show a token that is valid still."""
        lowered = {name.lower(): value for name, value in headers.items()}
        if not self._valid(lowered.get(TOKEN_HEADER.lower(), "")):
            return Answer(status=401, body="Unauthorized")
        if path == TOKEN_PATH:
            return Answer(status=405)
        known = _tree(self.announced())
        found = known.get(path.rstrip("/"))
        return found or Answer(status=404, body="Not Found")

    def _valid(self, token: str) -> bool:
        with self._lock:
            return self.clock() < self._tokens.get(token, float("-inf"))


def _tree(announced: Announcement) -> dict[str, Answer]:
    tree = {
        f"{_ROOT}/instance-id": Answer(status=200, body=announced.instance_id),
        f"{_ROOT}/instance-life-cycle": Answer(status=200, body="spot"),
        f"{_ROOT}/placement/availability-zone": Answer(status=200, body="testbed-1a"),
    }
    if announced.action:
        notice = {"action": announced.action, "time": announced.action_time}
        tree[f"{_ROOT}/spot/instance-action"] = _json(notice)
    if announced.action == "terminate":
        tree[f"{_ROOT}/spot/termination-time"] = Answer(status=200, body=str(announced.action_time))
    if announced.rebalance_time:
        tree[f"{_ROOT}/events/recommendations/rebalance"] = _json({"noticeTime": announced.rebalance_time})
    return tree


def _json(value: dict[str, Any]) -> Answer:
    return Answer(status=200, body=json.dumps(value), content_type="application/json")


class MetadataServer:
    """The service on a socket: in a node at the true address, in a unit test on loopback at a free port."""

    def __init__(self, imds: Imds, *, address: str = "127.0.0.1", port: int = 0) -> None:
        self._server = _Server((address, port), _handler(imds))
        self._thread = threading.Thread(target=self._server.serve_forever, name="metadata", daemon=True)

    @property
    def url(self) -> str:
        """Where it answers, without a slash at the end."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def start(self) -> None:
        """Answer in the background."""
        self._thread.start()

    def stop(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> MetadataServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Bind without http.server's look-up of the host's name, which may hang where there is no DNS."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


def _handler(imds: Imds) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "EC2ws"
        sys_version = ""
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(imds.get(self.path, dict(self.headers.items())))

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._reply(imds.put(self.path, dict(self.headers.items())))

        def _reply(self, answer: Answer) -> None:
            body = answer.body.encode()
            self.send_response(answer.status)
            for name, value in {"Content-Type": answer.content_type, **answer.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Keep still: a poll every few seconds is no news."""

    return Handler


__all__ = ["Announcement", "Answer", "Imds", "MetadataServer", "interruption", "rebalance"]
