"""Two runs take turns, and a lock file that was removed is no lock."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from holdfast_testbed.locks import locked


def test_who_comes_second_waits(tmp_path: Path) -> None:
    order: list[str] = []
    waiting = threading.Event()

    def second() -> None:
        waiting.set()
        with locked(tmp_path / "lock", what="a test"):
            order.append("second")

    with locked(tmp_path / "lock", what="a test"):
        other = threading.Thread(target=second)
        other.start()
        assert waiting.wait(60)
        time.sleep(0.2)  # for one whom the lock does not hold
        order.append("first")
    other.join(60)
    assert order == ["first", "second"]


def test_a_removed_lock_still_keeps_runs_apart(tmp_path: Path) -> None:
    inside, most = 0, 0
    counting = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        for _ in range(20):
            with locked(tmp_path / "lock", what="a test", remove=True):
                with counting:
                    inside += 1
                    most = max(most, inside)
                with counting:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert most == 1
    assert not (tmp_path / "lock").exists()
