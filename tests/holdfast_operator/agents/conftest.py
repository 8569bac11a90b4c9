"""Servers of the agents' API that stop with their test."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator

import pytest
from agents_api import LIMITS, Api, MemorySecrets, identify

from holdfast_operator.agents.certificate_authority import BuiltInAuthority
from holdfast_operator.agents.limits import Limits
from holdfast_operator.agents.routes import ServerMetrics
from holdfast_operator.agents.server import AgentServer
from holdfast_operator.agents.tls import TlsKeeper
from holdfast_operator.cluster.agent_hub import AgentHub


@pytest.fixture
def start() -> Iterator[Callable[..., Api]]:
    servers: list[AgentServer] = []

    def make(limits: Limits = LIMITS) -> Api:
        keeper = TlsKeeper(BuiltInAuthority(MemorySecrets(), ["127.0.0.1"]))
        keeper.refresh()
        answers: list[tuple[str, int]] = []
        hub = AgentHub(identify, lambda _job: None)
        hub.bind("uid-w0", "job-1")
        server = AgentServer(
            hub,
            keeper.context,
            host="127.0.0.1",
            port=0,
            limits=limits,
            observer=ServerMetrics(answered=lambda route, code: answers.append((route, code))),
        )
        servers.append(server)
        server.start()
        trust = ssl.create_default_context(cadata=keeper.credentials.bundle)
        return Api(hub=hub, server=server, client_context=trust, answers=answers)

    yield make
    for server in servers:
        server.stop(60)
        assert not server.alive()


@pytest.fixture
def api(start: Callable[..., Api]) -> Api:
    return start()
