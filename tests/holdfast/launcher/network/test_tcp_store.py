"""The TCP stores of attempts."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from holdfast.core.attempt import AttemptId
from holdfast.launcher.membership.messages import Master
from holdfast.launcher.network import tcp_store
from holdfast.launcher.network.tcp_store import StoreHost
from holdfast.launcher.process import child

DEADLINE = 240.0


async def _until(condition: Callable[[], bool]) -> None:
    end = asyncio.get_running_loop().time() + DEADLINE
    while not condition():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.01)


def test_store_outlives_other_proposals_while_its_attempt_trains() -> None:
    """If the first proposal closed the store, the final checkpoint of the attempt could not use it."""

    def connect(master: Master) -> Any:
        return dist.TCPStore(
            master.host, master.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=DEADLINE)
        )

    async def play() -> tuple[list[bytes], list[tuple[AttemptId, str]]]:
        lost: list[tuple[AttemptId, str]] = []
        host = StoreHost(lambda attempt_id, message: lost.append((attempt_id, message)))
        trains = host.open(AttemptId(1, 2), "127.0.0.1")
        held = await asyncio.to_thread(connect, trains)
        for attempt in (1, 2):
            host.open(AttemptId(2, attempt), "127.0.0.1", beside=AttemptId(1, 2))
        held.set("said", "here")
        again = await asyncio.to_thread(connect, trains)
        heard = [await asyncio.to_thread(again.get, "said")]
        last = host.open(AttemptId(2, 3), "127.0.0.1")
        newest = await asyncio.to_thread(connect, last)
        newest.set("said", "new")
        with pytest.raises(RuntimeError):
            await asyncio.to_thread(again.get, "said")
        heard.append(newest.get("said"))
        assert host.pid is not None
        os.kill(host.pid, signal.SIGKILL)
        await _until(lambda: bool(lost))
        return heard, lost

    heard, lost = asyncio.run(play())
    assert heard == [b"here", b"new"]
    assert [attempt_id for attempt_id, _ in lost] == [AttemptId(2, 3)]


def test_store_starts_next_to_a_file_named_like_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has the name of a module of the standard library."""
    (tmp_path / "queue.py").write_text("raise RuntimeError('a file of the user')")
    monkeypatch.chdir(tmp_path)

    async def play() -> bytes:
        host = StoreHost(lambda attempt_id, message: pytest.fail(message))
        master = host.open(AttemptId(1, 1), "127.0.0.1")
        patience = timedelta(seconds=DEADLINE)
        client = await asyncio.to_thread(
            lambda: dist.TCPStore(master.host, master.port, is_master=False, wait_for_workers=False, timeout=patience)
        )
        client.set("said", "here")
        said: bytes = client.get("said")
        host.close()
        return said

    assert asyncio.run(play()) == b"here"


def test_store_that_never_starts_ends_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        tcp_store, "own_program", lambda *_: [sys.executable, "-c", "import sys; sys.exit('no torch')"]
    )
    monkeypatch.setattr(child, "_DRAIN_LOOKS", round(DEADLINE / child._DRAIN_SECONDS))  # for its last output

    async def play() -> tuple[int, str]:
        lost: list[str] = []
        broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        host = StoreHost(lambda _, message: lost.append(message), on_broken=broken.set_result)
        for attempt in range(1, 4):
            host.open(AttemptId(1, attempt), "127.0.0.1")
            await _until(lambda: len(lost) == attempt)  # noqa: B023  (awaited at once)
        return len(lost), await broken

    times, why = asyncio.run(play())
    assert times == 3
    assert why.startswith("the store's process ended with 1 no torch, 3 times in a row")
