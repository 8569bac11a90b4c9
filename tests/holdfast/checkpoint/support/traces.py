"""Parse strace output: the system calls of processes in order, also for several threads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from holdfast_testbed.build.programs import find

STRACE = find("strace")  # installed by `make setup`
CHANGING = frozenset(
    """openat write pwrite64 writev fsync fdatasync close mkdir mkdirat rename renameat renameat2 link linkat
    unlink unlinkat rmdir ftruncate""".split()  # noqa: SIM905  (a list of names reads best as words)
)
_UNFINISHED = "<unfinished ...>"
_RESUMED = re.compile(r"^<\.\.\. \w+ resumed>(.*)")
_CALL = re.compile(r"^(\w+)\((.*)\) += (-?\d+)")
_PATH = re.compile(r"<([^<>]*)>")
_QUOTED = re.compile(r'"([^"]*)"')


@dataclass(frozen=True, kw_only=True)
class Call:
    """A completed call. `begun` and `ended` are positions in the trace."""

    thread: str
    name: str
    text: str
    value: int
    begun: int
    ended: int

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the paths among the arguments, or the path of the file descriptor (`strace -y`)."""
        if self.name in ("write", "pwrite64", "writev", "fsync", "fdatasync", "ftruncate", "close"):
            return tuple(_PATH.findall(self.text)[:1])
        return tuple(_QUOTED.findall(self.text))


def calls_in(text: str) -> Iterator[Call]:
    """Return the calls. A call that strace prints on two lines, because of another thread, counts once."""
    begun: dict[str, tuple[int, str]] = {}
    for place, line in enumerate(text.splitlines()):
        thread, _, call = (part.strip() for part in line.partition(" "))
        end = _RESUMED.match(call)
        if call.endswith(_UNFINISHED):
            begun[thread] = place, call.removesuffix(_UNFINISHED)
            continue
        first, start = begun.pop(thread, (place, "")) if end is not None else (place, "")
        match = _CALL.match(call if end is None else start + end[1])
        if match is not None:
            yield Call(thread=thread, name=match[1], text=match[2], value=int(match[3]), begun=first, ended=place)


def kill_points(calls: Iterable[Call], before: Counter[str] | None = None) -> list[tuple[str, int]]:
    """Return the calls that change the disk, each with its number in its thread: strace counts per thread."""
    counts: dict[str, Counter[str]] = {}
    found: dict[tuple[str, int], None] = {}
    for call in calls:
        count = counts.setdefault(call.thread, Counter(before or ()))
        count[call.name] += 1
        if call.name in CHANGING:
            found[call.name, count[call.name]] = None
    return list(found)
