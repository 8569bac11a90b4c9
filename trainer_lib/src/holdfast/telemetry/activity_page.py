"""The rank's activity page: the activity of its main thread, readable by the launcher in every state of this process.

It is a page of memory in the run directory, mapped by both. Two entries are written in turns, each with a check. So a
process that is stopped during a write leaves the other entry intact. A separate thread writes the time ten times per
second, the *beat*. It stops when the process is stopped or never releases the interpreter's lock. The stacks of all
threads are written on a signal, by C code that needs no lock of the interpreter.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import os
import signal
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.core.environment import Environment
from holdfast.telemetry.activity import Activity

BOARD_DIR: Final = "board"  # a page per rank process, by its slot
STACKS_SUFFIX: Final = ".stacks"
# Makes a rank process write the stacks of all its threads. Users' programs use SIGUSR1 and SIGUSR2, libraries the
# first real-time signals. It is sent only to a process whose page announces it.
STACKS_SIGNAL: Final = int(getattr(signal, "SIGRTMIN", 0)) + 11  # only Linux has real-time signals

_log = logging.getLogger("holdfast.progress")

BEAT_SECONDS: Final = 0.1
PAGE_BYTES: Final = 4096
_MAGIC: Final = int.from_bytes(b"HFBOARD1", "little")
_MASK: Final = (1 << 64) - 1
# Positions in the page, in bytes. Different threads write to different cache lines.
_HEAD: Final = struct.Struct("@3Q")  # magic, process ID, signal that writes the stacks (0: none)
_BEAT_AT: Final = 64
_COUNT_AT: Final = 128
_ENTRIES_AT: Final = (192, 256)
_ENTRY: Final = struct.Struct("@6Q")  # activity, since, step, since that step, steps made here, check
_WORD: Final = struct.Struct("@Q")
_ACTIVITIES: Final = tuple(Activity)
_NUMBERS: Final = {activity: number for number, activity in enumerate(_ACTIVITIES)}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The content of a page. Times are seconds of the monotonic clock, which the processes of a host share."""

    pid: int
    signal: int
    beat: float
    activity: Activity
    since: float
    step: int
    stepped: float  # when that step was reached
    made: int  # steps that this process made by itself


class Board:
    """A listener of activities. Only the main thread writes entries, and only the beat's thread writes beats."""

    def __init__(self, folder: Path, slot: int) -> None:
        self._page = _map(folder / str(slot))
        self._words = memoryview(self._page).cast("Q")
        self._step = self._made = self._count = 0
        self._stepped = time.monotonic_ns()
        self._stacks = (folder / f"{slot}{STACKS_SUFFIX}").open("ab", buffering=0)
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        self.entered(Activity.STARTUP, 0)
        self._beat()
        _HEAD.pack_into(self._page, 0, _MAGIC, os.getpid(), STACKS_SIGNAL)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._live, name="holdfast-beat", daemon=True)
        self._thread.start()

    def entered(self, activity: Activity, step: int) -> None:
        """Write that the main thread starts this activity."""
        now = time.monotonic_ns()
        if step != self._step:
            self._made += step == self._step + 1
            self._step, self._stepped = step, now
        self._count += 1
        entry = (_NUMBERS[activity], now, step, self._stepped, self._made)
        _ENTRY.pack_into(self._page, _ENTRIES_AT[self._count & 1], *entry, _check(entry))
        self._words[_COUNT_AT // 8] = self._count

    def close(self) -> None:
        """Close the page. Later writes have no effect."""
        self._closed.set()
        self._thread.join()
        faulthandler.unregister(STACKS_SIGNAL)
        self._stacks.close()
        self._words.release()
        self._page.close()

    def _live(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            self._beat()

    def _beat(self) -> None:
        self._words[_BEAT_AT // 8] = time.monotonic_ns()


def open_board(environment: Environment) -> Board | None:
    """Return this process's page; None without a launcher."""
    if environment.agent_socket is None or environment.slot is None:
        return None
    try:
        return Board(environment.agent_socket.parent / BOARD_DIR, environment.slot)
    except OSError as error:
        _log.warning("hangs of this process cannot be detected: its activity page cannot be created: %s", error)
        return None


def read_page(page: bytes) -> Reading | None:
    """Read a page; None if it is empty or not valid."""
    if len(page) < PAGE_BYTES:
        return None
    magic, pid, signal = _HEAD.unpack_from(page, 0)
    (count,) = _WORD.unpack_from(page, _COUNT_AT)
    entry = _entry(page, count & 1) or _entry(page, ~count & 1)
    if magic != _MAGIC or entry is None:
        return None
    number, since, step, stepped, made = entry
    (beat,) = _WORD.unpack_from(page, _BEAT_AT)
    return Reading(
        pid=pid,
        signal=signal,
        beat=beat / 1e9,
        activity=_ACTIVITIES[number],
        since=since / 1e9,
        step=step,
        stepped=stepped / 1e9,
        made=made,
    )


def _entry(page: bytes, which: int) -> tuple[int, ...] | None:
    *entry, check = _ENTRY.unpack_from(page, _ENTRIES_AT[which])
    sound = check == _check(tuple(entry)) and entry[0] < len(_ACTIVITIES)
    return tuple(entry) if sound else None


def _check(entry: tuple[int, ...]) -> int:
    number, since, step, stepped, made = entry
    return (_MAGIC ^ number ^ since ^ (step << 8) ^ (stepped << 16) ^ (made << 24)) & _MASK


def _map(path: Path) -> mmap.mmap:
    path.parent.mkdir(exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(file, PAGE_BYTES)
        return mmap.mmap(file, PAGE_BYTES)
    finally:
        os.close(file)
