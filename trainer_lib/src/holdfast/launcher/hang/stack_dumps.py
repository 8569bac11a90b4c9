"""What hung ranks and their mates were doing: kept before anything is killed.

A rank writes the stacks of all its threads when it gets the signal that its board names, in C, also while its
interpreter's lock is held. A stopped process writes nothing, and is not waited for. What the kernel says of a
process stands in the story only: no verdict is made of it.
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
_MAX_STORIES: Final = 20
_TOP_LINES: Final = 8
_MAX_LINE: Final = 200
_NOTHING: Final = "(it wrote no stacks)"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A rank process, and how to make it write its stacks."""

    rank: int
    leader: int  # of the process group that this launcher started
    pid: int  # as its board says; 0 if it has none
    signal: int
    file: Path


@dataclass(frozen=True, kw_only=True)
class Story:
    """What was found of one rank."""

    rank: int
    text: str
    kernel: str

    @property
    def top(self) -> tuple[str, ...]:
        """Where its main thread was, the innermost call first."""
        lines = self.text.rstrip().split("\n\n")[-1].splitlines()[1 : 1 + _TOP_LINES]
        return tuple(line.strip()[:_MAX_LINE] for line in lines)

    def __str__(self) -> str:
        return f"== rank {self.rank}: {self.kernel}\n{self.text or _NOTHING}\n"


async def gather(sources: Sequence[Source], *, seconds: float = _WAIT_SECONDS) -> list[Story]:
    """Ask all at once, and wait no longer than this for those that may still answer."""
    before = {source.file: _size(source.file) for source in sources}
    asked = [source for source in sources if _ask(source)]
    sizes = dict(before)
    for _ in range(round(seconds / _LOOK_SECONDS)):  # looks: time in which nobody here had a CPU does not count
        await asyncio.sleep(_LOOK_SECONDS)
        last, sizes = sizes, {source.file: _size(source.file) for source in sources}
        if all(before[s.file] < sizes[s.file] == last[s.file] or _stopped(s.pid) for s in asked):
            break
    return [_story(source, before[source.file]) for source in sources]


def keep(folder: Path, name: str, message: str, stories: Sequence[Story]) -> Path:
    """Write the stories of one hang into a file of its own, and drop those of long ago."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.txt"
    path.write_text("\n".join([message, "", *map(str, stories)]))
    for old in sorted(folder.iterdir(), key=lambda old: old.stat().st_mtime)[:-_MAX_STORIES]:
        old.unlink(missing_ok=True)
    return path


def _ask(source: Source) -> bool:
    """Only a process of ours that said it takes this signal: anything else would die of it."""
    with contextlib.suppress(OSError):
        if source.pid and source.signal and os.getpgid(source.pid) == source.leader:
            os.kill(source.pid, source.signal)
            return True
    return False


def _story(source: Source, start: int) -> Story:
    text = b""
    with contextlib.suppress(OSError), source.file.open("rb") as file:
        file.seek(start)
        text = file.read(_MAX_BYTES)
    return Story(rank=source.rank, text=text.decode(errors="replace"), kernel=_kernel(source.pid or source.leader))


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
