"""Saves the stacks of hung ranks and of the ranks that wait for them, before any process is killed.

A rank writes the stacks of all its threads on the signal that its activity page names. This is C code, which also
works while a thread holds the interpreter's lock. A stopped process writes nothing, and the launcher does not wait
for it. The kernel's view of a process is only part of the report: no verdict depends on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_WAIT_SECONDS: Final = 0.2
_LOOK_SECONDS: Final = 0.01
_MAX_BYTES: Final = 1 << 18
_MAX_DUMPS: Final = 20
_TOP_LINES: Final = 8
_MAX_LINE: Final = 200
_NOTHING: Final = "(it wrote no stacks)"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A rank process, and how to make it write its stacks."""

    rank: int
    leader: int  # of the process group that this launcher started
    pid: int  # from its page; 0 without one
    signal: int
    file: Path


@dataclass(frozen=True, kw_only=True)
class StackDump:
    """The report on one rank."""

    rank: int
    text: str
    kernel: str

    @property
    def top(self) -> tuple[str, ...]:
        """The frames of its main thread, the innermost first."""
        lines = self.text.rstrip().split("\n\n")[-1].splitlines()[1 : 1 + _TOP_LINES]
        return tuple(line.strip()[:_MAX_LINE] for line in lines)

    def __str__(self) -> str:
        return f"== rank {self.rank}: {self.kernel}\n{self.text or _NOTHING}\n"


async def gather(sources: Sequence[Source], *, seconds: float = _WAIT_SECONDS) -> list[StackDump]:
    """Signal all processes at once, and wait at most this long for those that can answer."""
    before = {source.file: _size(source.file) for source in sources}
    requested = [source for source in sources if _request(source)]
    sizes = dict(before)
    for _ in range(round(seconds / _LOOK_SECONDS)):  # looks, not seconds: CPU starvation must not shorten it
        await asyncio.sleep(_LOOK_SECONDS)
        last, sizes = sizes, {source.file: _size(source.file) for source in sources}
        if all(before[s.file] < sizes[s.file] == last[s.file] or _stopped(s.pid) for s in requested):
            break
    return [_dump(source, before[source.file]) for source in sources]


def keep(folder: Path, name: str, message: str, dumps: Sequence[StackDump]) -> Path:
    """Write the reports of one hang to a new file, and delete old files."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.txt"
    path.write_text("\n".join([message, "", *map(str, dumps)]))
    for old in sorted(folder.iterdir(), key=lambda old: old.stat().st_mtime)[:-_MAX_DUMPS]:
        old.unlink(missing_ok=True)
    return path


def _request(source: Source) -> bool:
    """Send the signal only to a local process that announced it: any other process would end."""
    with contextlib.suppress(OSError):
        if source.pid and source.signal and os.getpgid(source.pid) == source.leader:
            os.kill(source.pid, source.signal)
            return True
    return False


def _dump(source: Source, start: int) -> StackDump:
    text = b""
    with contextlib.suppress(OSError), source.file.open("rb") as file:
        file.seek(start)
        text = file.read(_MAX_BYTES)
    return StackDump(
        rank=source.rank, text=text.decode(errors="replace"), kernel=_kernel(source.pid or source.leader)
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _stopped(pid: int) -> bool:
    return _state(pid)[:1] in ("T", "t", "Z", "")


def _state(pid: int) -> str:
    for line in _proc(pid, "status").splitlines():
        if line.startswith("State:"):
            return line.removeprefix("State:").strip()
    return ""


def _kernel(pid: int) -> str:
    wchan = _proc(pid, "wchan").strip("0\n")
    return f"pid {pid}, {_state(pid) or 'gone'}" + (f", in the kernel at {wchan}" if wchan else "")


def _proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""
