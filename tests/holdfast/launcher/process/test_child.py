"""Child processes: their output, their ends, and orphans."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.log_format import LogContext, configure
from holdfast.launcher.process import child
from holdfast.launcher.process.child import ChildProcess, ProcessExit

DEADLINE = 240.0


ORPHANS = """
import os, time
read, write = os.pipe()
if os.fork() == 0:
    orphan = os.fork()
    if orphan:
        os.write(write, str(orphan).encode())
    os._exit(0)
os.wait()
orphan = int(os.read(read, 20))
while True:
    try:
        os.kill(orphan, 0)
    except ProcessLookupError:
        os._exit(5)
    time.sleep(0.01)
"""


AS_PID_1 = """
import asyncio, os, sys
from holdfast.launcher.process.child import ChildProcess, Reaper

async def main():
    ended = asyncio.get_running_loop().create_future()
    own = ChildProcess(argv=[sys.executable, "-c", sys.argv[1]], environ={}, on_exit=ended.set_result)
    reaper = Reaper(lambda pid: pid == own.pid)
    orphans = []
    while not ended.done():
        orphans += reaper.reap()
        await asyncio.sleep(0.02)
    print(os.getpid(), ended.result().returncode, len(orphans), own.pid in orphans)

asyncio.run(main())
"""


@pytest.mark.usefixtures("hears_out")
def test_a_child_is_heard_to_its_last_line() -> None:
    async def play() -> ProcessExit:
        ended: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
        code = "import sys; sys.stderr.write(''.join(f'{n}\\n' for n in range(100)) + 'end'); sys.exit(7)"
        ChildProcess(argv=[sys.executable, "-c", code], environ={}, on_exit=ended.set_result)
        return await asyncio.wait_for(ended, DEADLINE)

    end = asyncio.run(play())
    assert end.returncode == end.exit_code == 7
    assert end.stderr_tail[-2:] == ("99", "end")
    assert len(end.stderr_tail) <= 40


def test_a_child_whose_words_find_no_room_is_read_to_its_end() -> None:
    """A pipe without a reader would end the child."""
    read, write = os.pipe()
    os.write(write, b"first\nlast\n")
    os.close(write)
    tail: deque[str] = deque()
    with Path("/dev/full").open("wb", buffering=0) as full:
        child._copy(os.fdopen(read, "rb"), full.fileno(), "w0: ", tail)
    assert list(tail) == ["first", "last"]


def test_launcher_pause_takes_no_time_from_copying_last_output() -> None:
    """One wait passes without any CPU time for this process, and the copier needs a second one."""

    class Copier:
        waits = 0

        def join(self, _: float) -> None:
            self.waits += 1

    copier: Any = Copier()
    child._join([copier])
    assert copier.waits > 1


def test_as_pid_1_orphans_are_reaped_and_own_children_left_alone() -> None:
    """The launcher gets the orphans of its own PID namespace. The child creates an orphan, and ends after it."""
    if os.geteuid() != 0:
        pytest.skip("needs the right to make a PID namespace")
    words = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", AS_PID_1, ORPHANS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE)
    assert done.stdout.split() == ["1", "5", "1", "False"], done.stderr


def test_a_full_pipe_does_not_stop_who_logs() -> None:
    reader, writer = os.pipe()
    with open(reader) as source, open(writer, "w") as stream:  # noqa: PTH123  (descriptors, not paths)
        logger = configure(LogContext(), stream=stream, background=True)
        for n in range(3000):
            logger.info("line %d %s", n, "x" * 100)
        lines = [json.loads(source.readline())["msg"].split()[1] for _ in range(3000)]
        assert lines == [str(n) for n in range(3000)]
        for handler in logger.handlers:
            handler.close()
        logger.handlers.clear()
        logger.propagate = True
