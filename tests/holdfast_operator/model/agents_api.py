"""A running server of the agents' API, clients that keep to its rules, and clients that do not."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast_operator.agents.limits import Limits
from holdfast_operator.agents.server import AgentServer
from holdfast_operator.cluster.agent_hub import AgentHub, PodIdentity
from holdfast_operator.cluster.secrets import StoredSecret
from holdfast_operator.errors import AuthenticationUnavailableError

CONTRACT = Path(__file__).parents[2] / "contract"
GOLDEN = json.loads((CONTRACT / "report.json").read_text())
WORKER = "pod:uid-w0"
# A client that does its part must be served on a busy machine too: each short limit is set where one runs into it.
LIMITS = Limits(
    hold_seconds=0.5,
    body_seconds=120,
    first_request_seconds=120,
    idle_seconds=120,
    handshake_seconds=120,
    connections_per_peer=40,
)
HELD = replace(LIMITS, hold_seconds=240, connections_per_peer=200)
AT_ONCE = replace(LIMITS, body_seconds=0.5, first_request_seconds=0.5)


class MemorySecrets:
    """A ``SecretStore`` without a cluster."""

    def __init__(self) -> None:
        self.content: dict[str, dict[str, bytes]] = {}

    def read(self, name: str) -> StoredSecret | None:
        return StoredSecret(data=self.content[name], version="1") if name in self.content else None

    def create(self, name: str, data: Any) -> bool:
        self.content[name] = dict(data)
        return True

    def replace(self, name: str, data: Any, version: str) -> bool:
        self.content[name] = dict(data)
        return True


def identify(token: str) -> PodIdentity | None:
    """Tokens are `pod:<uid>`; `down` is a token during an outage of the API server."""
    if token == "down":
        raise AuthenticationUnavailableError("no API server")
    if not token.startswith("pod:"):
        return None
    return PodIdentity(namespace="ml", pod="p", pod_uid=token.removeprefix("pod:"))


@dataclass
class Api:
    """A running server and a client for it."""

    hub: AgentHub
    server: AgentServer
    client_context: ssl.SSLContext
    answers: list[tuple[str, int]]

    def connect(self, timeout: float = 120) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(
            "127.0.0.1", self.server.port, timeout=timeout, context=self.client_context
        )

    def call(self, method: str, path: str, token: str | None = WORKER, body: bytes | None = None) -> tuple[int, Any]:
        connection = self.connect()
        try:
            headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            content = answer.read()
            is_json = answer.getheader("Content-Type", "").startswith("application/json")
            return answer.status, json.loads(content) if is_json else None
        finally:
            connection.close()


def body(**change: Any) -> bytes:
    return json.dumps({**GOLDEN, **change}).encode()


def ended(connection: socket.socket) -> bool:
    """Whether the other side has ended it, or does so now."""
    try:
        return connection.recv(64) == b""
    except ConnectionError:
        return True


def works(api: Api) -> bool:
    try:
        return api.call("GET", "/nothing")[0] == 404
    except (OSError, http.client.HTTPException):
        return False


def tls(api: Api) -> ssl.SSLSocket:
    raw = socket.create_connection(("127.0.0.1", api.server.port), timeout=120)
    return api.client_context.wrap_socket(raw, server_hostname="127.0.0.1")


def trickle(connection: ssl.SSLSocket, piece: bytes) -> None:
    """Send piece after piece until the other side has had enough."""
    over = threading.Event()

    def send() -> None:
        while not over.wait(0.05):
            try:
                connection.sendall(piece)
            except OSError:
                return

    sender = threading.Thread(target=send)
    sender.start()
    sender.join(120)
    over.set()
    assert not sender.is_alive(), "the server went on to read"


def drained(connection: ssl.SSLSocket) -> bytes | None:
    try:
        return connection.recv(64)
    except OSError:
        return None


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)
