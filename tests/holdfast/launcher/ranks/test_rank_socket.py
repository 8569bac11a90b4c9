"""The socket on which ranks send messages to their launcher."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from holdfast.launcher.ranks.rank_socket import AgentSocket

DEADLINE = 240.0


def test_rank_sending_a_deeply_nested_line_is_disconnected(
    short_path: Path,
) -> None:
    """Messages of the other ranks are still received."""

    async def play() -> None:
        heard: list[int] = []
        unhandled: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, told: unhandled.append(told))
        agent = AgentSocket(short_path / "agent.sock", lambda message: heard.append(message.connection.rank))
        await agent.start()
        reader, writer = await asyncio.open_unix_connection(short_path / "agent.sock")
        writer.write(b"[" * 200_000 + b"\n")
        assert await asyncio.wait_for(reader.read(), DEADLINE) == b""
        hello = {"type": "hello", "rank": 3, "localRank": 0, "pid": 7, "generation": 1, "attempt": 1}
        _, other = await asyncio.open_unix_connection(short_path / "agent.sock")
        other.write(json.dumps(hello).encode() + b"\n")
        async with asyncio.timeout(DEADLINE):
            while not heard:
                await asyncio.sleep(0.01)
        assert (heard, unhandled) == ([3], [])
        await agent.close()

    asyncio.run(play())
