"""The control channel: which peers are admitted, which count as dead, and which do not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from holdfast.core.errors import AuthenticationError, ControlError
from holdfast.launcher.membership.events import How
from holdfast.launcher.network import handshake
from holdfast.launcher.network.control_channel import Address, AwakeClock, ControlChannel

KEY = b"k" * 32


class Heard:
    """The events of a channel."""

    def __init__(self) -> None:
        self.up: list[str] = []
        self.down: list[tuple[str, How]] = []
        self.said: list[tuple[str, Mapping[str, Any]]] = []
        self.rejected = 0

    def peer_up(self, uid: str) -> None:
        self.up.append(uid)

    def peer_down(self, uid: str, how: How) -> None:
        self.down.append((uid, how))

    def peer_message(self, uid: str, body: Mapping[str, Any]) -> None:
        self.said.append((uid, body))

    def connection_rejected(self) -> None:
        self.rejected += 1


async def until(condition: Callable[[], object], *, every: float = 0.01) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(every)


async def channel(me: str, heard: Heard, dead_after: float = 1.0) -> ControlChannel:
    made = ControlChannel(me=me, listener=heard, heartbeat=0.1, dead_after=dead_after)
    await made.start("127.0.0.1", 0)
    return made


def configure(made: ControlChannel, peers: dict[str, int], key: bytes = KEY, dead_after: float = 1.0) -> None:
    addresses = {uid: Address(host="127.0.0.1", port=port) for uid, port in peers.items()}
    made.configure(key=key, peers=addresses, heartbeat=0.1, dead_after=dead_after)


async def pair(dead_after: float = 1.0) -> tuple[ControlChannel, Heard, ControlChannel, Heard]:
    heard_a, heard_b = Heard(), Heard()
    a, b = await channel("a", heard_a, dead_after), await channel("b", heard_b, dead_after)
    configure(a, {"b": b.port}, dead_after=dead_after)
    configure(b, {"a": a.port}, dead_after=dead_after)
    await until(lambda: heard_a.up == ["b"] and heard_b.up == ["a"])
    return a, heard_a, b, heard_b


def test_two_launchers_connect_once_and_hear_each_other() -> None:
    async def play() -> None:
        a, heard_a, b, heard_b = await pair()
        a.send("b", {"type": "hello", "n": 1})
        b.send("a", {"type": "hello", "n": 2})
        await until(lambda: heard_a.said and heard_b.said)
        assert heard_a.said == [("b", {"type": "hello", "n": 2})]
        assert heard_b.said == [("a", {"type": "hello", "n": 1})]
        await a.close()
        await until(lambda: heard_b.down)
        assert heard_b.down == [("a", How.CLOSED)]
        await b.close()

    asyncio.run(play())


def test_news_during_the_handshake_makes_no_second_connection() -> None:
    async def play() -> None:
        heard_a, heard_b = Heard(), Heard()
        a, b = await channel("a", heard_a), await channel("b", heard_b)
        configure(b, {"a": a.port})

        def news() -> bool:
            configure(a, {"b": b.port})
            return bool(heard_a.up)

        await until(news, every=0.0)
        await until(lambda: heard_b.up)
        a.send("b", {"type": "hello"})
        await until(lambda: heard_b.said)
        assert (heard_a.up, heard_a.down, heard_b.up, heard_b.down) == (["b"], [], ["a"], [])
        await a.close()
        await b.close()

    asyncio.run(play())


def test_a_launcher_that_comes_back_is_connected_again() -> None:
    async def play() -> None:
        a, heard_a, b, _ = await pair()
        await b.close()
        await until(lambda: heard_a.down)
        again = await channel("b", Heard())
        configure(again, {"a": a.port})
        configure(a, {"b": again.port})
        await until(lambda: heard_a.up == ["b", "b"])
        await a.close()
        await again.close()

    asyncio.run(play())


def test_a_peer_that_says_nothing_is_silent() -> None:
    async def play() -> None:
        heard = Heard()
        a = await channel("a", heard, 0.5)

        async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = await handshake.answer(reader, writer, me="b", key=KEY)
            connection.send({"type": "beat"})
            await asyncio.Event().wait()

        server = await asyncio.start_server(mute, "127.0.0.1", 0)
        configure(a, {"b": server.sockets[0].getsockname()[1]}, dead_after=0.5)
        await until(lambda: heard.up)
        await until(lambda: heard.down)
        assert heard.down[0] == ("b", How.SILENT)
        await a.close()
        server.close()

    asyncio.run(play())


def test_peer_without_heartbeats_is_unheard_long_before_dead() -> None:
    async def play() -> None:
        heard = Heard()
        a = await channel("a", heard, 60.0)

        async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = await handshake.answer(reader, writer, me="b", key=KEY)
            connection.send({"type": "beat"})
            await asyncio.Event().wait()

        server = await asyncio.start_server(mute, "127.0.0.1", 0)
        assert not a.heard_lately("b")
        configure(a, {"b": server.sockets[0].getsockname()[1]}, dead_after=60.0)
        await until(lambda: heard.up)
        assert a.heard_lately("b")
        await until(lambda: not a.heard_lately("b"))
        assert heard.down == []
        await a.close()
        server.close()

    asyncio.run(play())


def test_a_peer_that_is_not_there_is_refused() -> None:
    async def play() -> None:
        heard = Heard()
        with socket.socket() as deaf:  # held, so that no other program listens there meanwhile
            deaf.bind(("127.0.0.1", 0))
            a = await channel("a", heard, 0.3)
            configure(a, {"b": deaf.getsockname()[1]}, dead_after=0.3)
            await until(lambda: heard.down)
        assert heard.down == [("b", How.REFUSED)]
        await a.close()

    asyncio.run(play())


def test_our_own_stall_makes_nobody_look_dead() -> None:
    async def play() -> None:
        a, heard_a, b, heard_b = await pair(dead_after=0.5)
        time.sleep(1.5)  # this loop stands still, and with it every heartbeat
        for n in range(20):
            a.send("b", {"type": "hello", "n": n})
            b.send("a", {"type": "hello", "n": n})
            await until(lambda n=n: len(heard_a.said) == len(heard_b.said) == n + 1)
        assert heard_a.down == heard_b.down == []
        await a.close()
        await b.close()

    asyncio.run(play())


def test_the_clock_stands_still_while_the_loop_does() -> None:
    clock = AwakeClock(0.1)
    assert clock.beat(100.0) == 0.0
    assert clock.beat(100.1) == 0.0
    before = clock.now
    assert clock.beat(160.1) == pytest.approx(59.8)
    assert clock.now - before == pytest.approx(0.2)


@pytest.mark.parametrize("wrong", ["dialer", "acceptor"])
def test_neither_side_is_let_in_without_the_key(wrong: str) -> None:
    async def play() -> None:
        refused: list[Exception] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await handshake.answer(reader, writer, me="b", key=KEY if wrong == "dialer" else b"x" * 32)
            except ControlError as error:
                refused.append(error)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        key = b"x" * 32 if wrong == "dialer" else KEY
        with pytest.raises(AuthenticationError):
            await handshake.dial("127.0.0.1", port, me="a", peer="b", key=key, timeout=60)
        await until(lambda: refused)
        server.close()

    asyncio.run(play())


def test_a_dialer_without_the_key_cannot_skip_its_proof() -> None:
    async def play() -> None:
        refused: list[Exception] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await handshake.answer(reader, writer, me="b", key=KEY)
            except ControlError as error:
                refused.append(error)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        writer.write(handshake.encode({"version": 1, "podUID": "a", "to": "b", "nonce": "0" * 32}))
        answer = await handshake.read_line(reader)
        assert answer is not None
        writer.write(handshake.encode({"mac": answer["mac"]}))  # the acceptor's own proof, sent back to the acceptor
        await until(lambda: refused)
        assert isinstance(refused[0], AuthenticationError)
        server.close()

    asyncio.run(play())


@pytest.mark.parametrize("wrong", ["a", "b"])
def test_who_does_not_hold_the_key_is_turned_away_and_counted(wrong: str) -> None:
    """Peer a connects to b. If either has the wrong key, no channel opens."""

    async def play() -> None:
        heard = {"a": Heard(), "b": Heard()}
        a, b = await channel("a", heard["a"]), await channel("b", heard["b"])
        configure(a, {"b": b.port}, key=b"x" * 32 if wrong == "a" else KEY)
        configure(b, {"a": a.port}, key=b"x" * 32 if wrong == "b" else KEY)
        await until(lambda: heard["a"].rejected and heard["b"].rejected)
        assert (heard["a"].up, heard["b"].up) == ([], [])
        assert (a.connected(), b.connected()) == (frozenset(), frozenset())
        await a.close()
        await b.close()

    asyncio.run(play())


async def _flood(port: int, count: int, opened: list[int]) -> None:
    """Keep connections open that send nothing, and reopen each one that is dropped."""

    async def hold() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                opened.append(1)
                await reader.read()
                writer.close()
            await asyncio.sleep(0.02)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            tasks.create_task(hold())


def test_silent_connections_keep_no_launcher_out() -> None:
    """There are more of them than the channel has places, all from the address of the launcher that must be
    admitted."""

    async def play() -> None:
        heard_a, heard_b = Heard(), Heard()
        b = await channel("b", heard_b)
        configure(b, {})
        opened: list[int] = []
        flood = asyncio.create_task(_flood(b.port, 80, opened))
        await until(lambda: len(opened) > 200)
        a = await channel("a", heard_a)
        configure(a, {"b": b.port})
        await until(lambda: heard_a.up)
        assert heard_b.rejected, "the flood is counted"
        flood.cancel()
        await asyncio.gather(flood, return_exceptions=True)
        await a.close()
        await b.close()

    asyncio.run(play())


@pytest.mark.parametrize(("sent", "rejected"), [(b"", 0), (b"x", 1)])
def test_a_probe_of_the_port_is_no_stranger_and_a_wrong_byte_is(sent: bytes, rejected: int) -> None:
    async def play() -> None:
        heard = Heard()
        made = await channel("b", heard)
        configure(made, {})
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(sent)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b"", "it was judged"
        assert heard.rejected == rejected
        await made.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    "rubbish",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b"\xff\n",
        b'{"version": 9}\n',
        b"x" * (2 << 20),
        b"[" * 2000 + b"\n",
        b'{"version": 1, "podUID": "\\ud800", "to": "a", "nonce": "0"}\n',
    ],
)
def test_rubbish_is_refused_and_harms_nobody(rubbish: bytes) -> None:
    async def play() -> None:
        a, heard_a, b, _ = await pair()
        reader, writer = await asyncio.open_connection("127.0.0.1", a.port)
        writer.write(rubbish)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        assert heard_a.rejected == 1
        assert heard_a.down == []
        assert a.connected() == {"b"}
        await a.close()
        await b.close()

    asyncio.run(play())


@pytest.mark.parametrize("line", [b"[" * 2000 + b"\n", b'{"nonce": "\\ud800"}\n'])
def test_a_line_that_cannot_be_taken_is_an_error_of_the_channel(line: bytes) -> None:
    async def play() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(line)
        with pytest.raises(ControlError):
            await handshake._expect(reader, "nonce")

    asyncio.run(play())
