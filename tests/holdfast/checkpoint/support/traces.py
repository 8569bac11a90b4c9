"""What strace tells of processes: their system calls, in order, also where several threads make them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from holdfast_testbed.build.programs import find

STRACE = find("strace")  # `make setup` brings it
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
    """One that ended; `begun` and `ended` are places in the order of all that was told."""

    thread: str
    name: str
    text: str
    value: int
    begun: int
    ended: int

    @property
    def paths(self) -> tuple[str, ...]:
        """Those that it was given as text; of one that was given a file, that file's (`strace -y`)."""
        if self.name in ("write", "pwrite64", "writev", "fsync", "fdatasync", "ftruncate", "close"):
            return tuple(_PATH.findall(self.text)[:1])
        return tuple(_QUOTED.findall(self.text))


def calls_in(text: str) -> Iterator[Call]:
    """A call of which strace tells in two lines, because another thread's came between, is one."""
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
    """A call by which the disk changes, and which one of its thread's it is: strace counts each thread's own."""
    counts: dict[str, Counter[str]] = {}
    found: dict[tuple[str, int], None] = {}
    for call in calls:
        count = counts.setdefault(call.thread, Counter(before or ()))
        count[call.name] += 1
        if call.name in CHANGING:
            found[call.name, count[call.name]] = None
    return list(found)
