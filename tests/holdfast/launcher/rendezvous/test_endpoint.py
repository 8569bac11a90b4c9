"""Launchers that look for their endpoint log what they found, and accept no other program there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

import pytest

from holdfast.core.errors import UsageError
from holdfast.launcher.rendezvous import connection, endpoint
from holdfast.launcher.rendezvous.endpoint import bind, choose, remarks, resolve

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Names:
    """A DNS that resolves a name after this number of queries. Sleeping takes no time."""

    def __init__(self, unknown: float, error: int = socket.EAI_NONAME) -> None:
        self.asked = 0
        self._unknown, self._error = unknown, error

    async def look_up(self, host: str, port: int) -> Sequence[str]:
        self.asked += 1
        if self.asked <= self._unknown:
            raise socket.gaierror(self._error, "Name or service not known")
        return ["10.0.0.5"]

    async def sleep(self, seconds: float) -> None:
        pass

    def resolve(self, timeout: float = 600) -> Sequence[str]:
        return asyncio.run(resolve("gpu-1", 29400, timeout=timeout, lookup=self.look_up, sleep=self.sleep))


@pytest.mark.parametrize("error", [socket.EAI_NONAME, socket.EAI_AGAIN])
def test_name_without_an_address_is_waited_for_and_logged_once(error: int, caplog: pytest.LogCaptureFixture) -> None:
    assert Names(20, error).resolve() == ["10.0.0.5"]
    (text,) = caplog.messages
    assert "gpu-1: the name has no address yet" in text


def test_a_name_that_never_has_one_ends_the_wait() -> None:
    with pytest.raises(UsageError, match="gpu-1:29400: the name has no address"):
        Names(1e9).resolve(timeout=30)


def test_a_lookup_that_cannot_succeed_is_not_repeated() -> None:
    names = Names(1e9, socket.EAI_FAMILY)
    with pytest.raises(UsageError):
        names.resolve()
    assert names.asked == 1


@pytest.mark.parametrize(
    ("addresses", "chosen"),
    [
        (["::1", "127.0.0.1"], "127.0.0.1"),
        (["10.0.0.9", "10.0.0.5"], "10.0.0.5"),
        (["127.0.1.1", "10.0.0.5"], "10.0.0.5"),
        (["fd00::5", "10.0.0.5"], "10.0.0.5"),
        (["::1"], "::1"),
    ],
)
def test_every_launcher_takes_the_same_of_several_addresses(addresses: list[str], chosen: str) -> None:
    assert choose(addresses) == choose(addresses[::-1]) == chosen


@pytest.mark.parametrize(
    ("host", "addresses", "said"),
    [
        ("gpu-1", ["127.0.1.1"], ["is 127.0.1.1 on this host, which other hosts cannot reach"]),
        ("gpu-1", ["10.0.0.9", "10.0.0.5"], ["has 2 addresses (10.0.0.9, 10.0.0.5): all launchers use 10.0.0.5"]),
        ("gpu-1", ["10.0.0.5"], []),
        ("localhost", ["127.0.0.1"], []),
        ("127.0.0.1", ["127.0.0.1"], []),
    ],
)
def test_what_may_keep_hosts_apart_is_told(host: str, addresses: list[str], said: list[str]) -> None:
    found = remarks(host, addresses)
    assert len(found) == len(said)
    assert all(part in text for part, text in zip(said, found, strict=True))


def test_an_address_is_owned_once_and_by_its_own_host() -> None:
    first = bind("127.0.0.1", 0)
    assert first.listener is not None
    with first.listener:
        taken = bind("127.0.0.1", first.listener.getsockname()[1])
    assert (taken.listener, taken.elsewhere) == (None, False)
    foreign = bind("192.0.2.1", 29400)
    assert (foreign.listener, foreign.elsewhere) == (None, True)


async def _dial(serve: Serve | None, timeout: float) -> None:
    server = await asyncio.start_server(serve or _close, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    if serve is None:
        server.close()
        await server.wait_closed()
    try:
        await connection.dial("127.0.0.1", port, me="a", secret=b"k" * 32, timeout=timeout)
    finally:
        server.close()


async def _http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()
    writer.write(b"HTTP/1.0 400 Bad request\r\n\r\n")
    writer.close()


async def _close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def _listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.CancelledError):  # the test is over
        await reader.read()
    writer.close()


class EnoughError(Exception):
    """Raised at the end of a wait."""


def test_another_programs_answer_ends_the_wait_at_once() -> None:
    with pytest.raises(UsageError, match=r"another program listens there, not a launcher .* another port"):
        asyncio.run(_dial(_http, timeout=600))


@pytest.mark.parametrize(
    ("serve", "said"),
    [
        (None, "no program listens there"),
        (_close, "closes connections, and does not answer as a launcher"),
        (_listen, "accepts connections, but does not answer as a launcher"),
    ],
)
def test_what_is_at_the_endpoint_is_told_while_it_is_waited_for(
    serve: Serve | None, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = 0.1 if serve is _listen else 240.0
    monkeypatch.setattr("holdfast.launcher.network.handshake.HANDSHAKE_SECONDS", silent)
    with pytest.raises(UsageError, match=said):
        asyncio.run(_dial(serve, timeout=0.0))
    look_up, tries = endpoint.look_up, iter(range(3))

    async def thrice(host: str, port: int) -> Sequence[str]:
        if next(tries, None) is None:
            raise EnoughError
        return await look_up(host, port)

    monkeypatch.setattr(endpoint, "look_up", thrice)
    with caplog.at_level(logging.INFO), pytest.raises(EnoughError):
        asyncio.run(_dial(serve, timeout=600))
    told = [record.getMessage() for record in caplog.records if record.name == "holdfast.launcher.rendezvous"]
    assert [said in text for text in told] == [True], "once"
