"""A process pool under test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from holdfast.launcher.process.child import Child, Origin, ProcessExit
from holdfast.launcher.process.spawn_pool import Pool

SCRIPTS = Path(__file__).parents[1] / "scripts"


DEADLINE = 240.0


PATIENCE = 240.0


class Bench:
    """A folder with a script and installed modules, and a pool for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.installed = folder / "site-packages"
        self.installed.mkdir()
        self.module("heavy", "VALUE = 1")
        self.environ = {
            **{name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.environ["PYTHONPATH"] = os.pathsep.join(
            [str(self.installed), str(Path(__file__).parents[4] / "trainer_lib" / "src")]
        )
        self.out = folder / "out"
        self.pool: Pool

    def module(self, name: str, source: str) -> None:
        (self.installed / f"{name}.py").write_text(textwrap.dedent(source))

    def script(self, source: str) -> list[str]:
        file = self.folder / "train.py"
        file.write_text(textwrap.dedent(source))
        return [sys.executable, str(file)]

    def start(self, **environ: str) -> tuple[Child, asyncio.Future[ProcessExit]]:
        ended: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
        given = {**self.environ, "RANK": "0", "HOLDFAST_OUT": str(self.out), **environ}
        return self.pool.spawn(environ=given, prefix="", on_exit=ended.set_result), ended

    async def run(self, origin: Origin, **environ: str) -> ProcessExit:
        child, ended = self.start(**environ)
        result = await ended
        assert child.origin == origin
        return result

    async def warm_up(self, ready: int = 1) -> None:
        self.pool.refill()
        await eventually(lambda: self.pool.ready == ready, "a process stands by")

    @contextlib.asynccontextmanager
    async def over(self, argv: list[str], *, warm: int = 1) -> AsyncIterator[None]:
        """Create a pool for a command, after its first run, which is always fresh."""
        self.pool = Pool(argv=argv, warm=warm)
        try:
            await self.run(Origin.FRESH)
            yield
        finally:
            self.pool.close()


async def eventually(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"not within {DEADLINE:.0f} s: {what}"
        await asyncio.sleep(0.01)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def gone(pid: int) -> bool:
    """Return whether a process is dead, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def children(name: str = "", parent: int | None = None) -> list[int]:
    """Return live children of a process (by default this one) by prefix. A child that just started has no name
    yet."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "comm").read_text().startswith(name):
                state, its_parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z" and int(its_parent) == (parent or os.getpid()):
                    found.append(int(entry.name))
    return found


def own_memory(pid: int) -> int:
    """Return the proportional memory of a process (PSS) in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) // 1024
