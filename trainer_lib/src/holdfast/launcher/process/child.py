"""One child process of the launcher, with its own process group, a pidfd, and the last lines of its output.

A child ends with its launcher (PR_SET_PDEATHSIG). The rest of its group is killed before the child is reaped, while
the zombie still reserves the process ID.

A descendant may have left the group (`setsid`), and gets another parent when the child ends. Each child therefore has
a mark in its environment, which every descendant inherits and `/proc/PID/environ` shows.

If a child fails or is killed, it counts as ended when all processes with its mark have ended: they may hold GPU
memory that its successor needs. After a normal end they stay, because the script may have detached them on purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import io
import itertools
import logging
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Final, cast

from holdfast.core import linux
from holdfast.core.environment import ENV_PROCESS_MARK
from holdfast.core.errors import SpawnError

_log = logging.getLogger("holdfast.launcher.process")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TAIL_LINES = 40
_TAIL_LINE_BYTES = 2000
_PIECE_BYTES = 1 << 16
# The last output is awaited in many short intervals: a suspended host uses up only one of them.
_DRAIN_LOOKS, _DRAIN_SECONDS = 25, 0.02
_NOT_STARTED = 127
# A killed process releases its memory within this time; a process that is stuck in a driver takes longer.
_DESCENDANTS_SECONDS: Final = 10.0
_DESCENDANTS_LOOK_SECONDS: Final = 0.02
_MARK_BYTES: Final = 8
# Children may use every core. The launcher needs little CPU time, but without delay, for its heartbeats.
_NICE = 5

_prctl = linux.prctl()  # prepared before any fork

# The children of this process that are not reaped yet.
_unreaped: set[int] = set()


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    pid: int
    returncode: int  # negative: the signal
    sent: frozenset[int]  # signals that this launcher sent to it
    stderr_tail: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """The exit code of a shell: 128 + n for signal n."""
        return 128 - self.returncode if self.returncode < 0 else self.returncode


class Origin(StrEnum):
    """How a process was created, the slowest first."""

    FRESH = "fresh"  # a new interpreter
    ZYGOTE = "zygote"  # forked on demand
    WARM = "warm"  # was on standby


class Child:
    """A child process that leads its own process group. Its `pid` is 0 until it exists.

    `on_exit` is called once, on the event loop, when the child and its group have ended.
    """

    def __init__(self, on_exit: Callable[[ProcessExit], None]) -> None:
        self.pid = 0
        self.origin = Origin.FRESH
        self.on_exit: Callable[[ProcessExit], None] | None = on_exit
        self.reaped = asyncio.Event()
        self.mark = new_mark()
        self._loop = asyncio.get_running_loop()
        self._sent: set[int] = set()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._pumps: list[threading.Thread] = []

    def launch(
        self,
        *,
        argv: Sequence[str],
        environ: Mapping[str, str],
        prefix: str = "",
        pass_fds: Sequence[int] = (),
        quiet: bool = False,
    ) -> None:
        """Start a new program. `quiet`: keep its output for the exit report only."""
        environ = {**environ, ENV_PROCESS_MARK: self.mark}
        popen = _start(argv, environ, piped_stdout=bool(prefix) or quiet, pass_fds=pass_fds)
        self.origin = Origin.FRESH
        self._attach(popen.pid, popen.wait)
        self.pump(popen.stderr, None if quiet else 2, prefix, keep=True)
        self.pump(popen.stdout, None if quiet else 1, prefix)

    def adopt(self, pid: int, mark: str) -> None:
        """Use a process that became a child of this one when its parent ended. Raises `OSError` if it is no child."""
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        self.mark = mark
        self._attach(pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def give_up(self, why: str) -> None:
        """Report that the child could not be started, with the exit code of a shell."""
        self._tail.append(why)
        self._over(_NOT_STARTED)

    def _attach(self, pid: int, wait: Callable[[], int]) -> None:
        self.pid = pid
        self._wait = wait
        self._pidfd = os.pidfd_open(pid)
        _unreaped.add(pid)
        self._loop.add_reader(self._pidfd, self._ended)
        for number in self._sent:
            self.send(number)

    @property
    def alive(self) -> bool:
        """Whether the child has not been reaped yet."""
        return not self.reaped.is_set()

    def send(self, number: int) -> None:
        """Send a signal to the whole process group."""
        if self.alive:
            self._sent |= {number}
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if self.pid:
                    os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kill the whole group."""
        self.send(signal.SIGKILL)

    def dismiss(self) -> None:
        """Kill the whole group without calling `on_exit`."""
        self.on_exit = None
        self.kill()

    def pump(self, source: IO[bytes] | None, target: int | None, prefix: str = "", *, keep: bool = False) -> None:
        """Copy the child's output to a descriptor, or discard it; `keep` its end for the exit report."""
        if source is None:
            return
        reader = cast(io.BufferedReader, source)
        tail = self._tail if keep else None
        thread = threading.Thread(target=_copy, args=(reader, target, prefix, tail), daemon=True)
        thread.start()
        self._pumps.append(thread)

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        left = set() if _ended_well(self.pid) else _kill_marked(self.mark)
        if left:
            self._outlasting = self._loop.create_task(self._outlast(left))
        else:
            self._reap()

    async def _outlast(self, left: set[int]) -> None:
        """Wait until no process with the child's mark is left."""
        deadline = self._loop.time() + _DESCENDANTS_SECONDS
        while left and self._loop.time() < deadline:
            await asyncio.sleep(_DESCENDANTS_LOOK_SECONDS)
            over, _, _ = select.select(left, (), (), 0)
            for pidfd in over:
                os.close(pidfd)
            left = left.difference(over) or _kill_marked(self.mark)
        if left:
            text = "%d processes that process %d had started were killed %.0f s ago and still hold their memory"
            _log.warning(text, len(left), self.pid, _DESCENDANTS_SECONDS)
        for pidfd in left:
            os.close(pidfd)
        self._reap()

    def _reap(self) -> None:
        returncode = self._wait()
        _unreaped.discard(self.pid)
        self._over(returncode)

    def _over(self, returncode: int) -> None:
        self.reaped.set()
        if self.on_exit is not None:
            self._loop.create_task(self._report(returncode, self.on_exit))

    async def _report(self, returncode: int, on_exit: Callable[[ProcessExit], None]) -> None:
        if returncode != -signal.SIGKILL:  # a killed process had no time for last lines
            await asyncio.to_thread(_join, self._pumps)
        on_exit(
            ProcessExit(
                pid=self.pid,
                returncode=returncode,
                sent=frozenset(self._sent),
                stderr_tail=tuple(self._tail),
            )
        )


class ChildProcess(Child):
    """A program that starts at once. Raises `SpawnError`."""

    def __init__(
        self,
        *,
        argv: Sequence[str],
        environ: Mapping[str, str],
        on_exit: Callable[[ProcessExit], None],
        prefix: str = "",
        pass_fds: Sequence[int] = (),
        quiet: bool = False,
    ) -> None:
        super().__init__(on_exit)
        self.launch(argv=argv, environ=environ, prefix=prefix, pass_fds=pass_fds, quiet=quiet)


def new_mark() -> str:
    """Return a unique mark."""
    return secrets.token_hex(_MARK_BYTES)


def mark_this_process() -> str:
    """Replace the mark that this process inherited by fork, as `/proc/PID/environ` shows it. Return the new mark."""
    mark = new_mark()
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    ctypes.memmove(getenv(ENV_PROCESS_MARK.encode()), mark.encode(), len(mark))
    return mark


def _ended_well(pid: int) -> bool:
    """Whether a child that has ended, and is not reaped, exited with 0."""
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return info is not None and info.si_code == os.CLD_EXITED and info.si_status == 0


def _kill_marked(mark: str) -> set[int]:
    """Kill every process with this mark. Return their pidfds, which the caller closes."""
    killed = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or not _has_mark(entry.path, mark):
            continue
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(int(entry.name))
            killed.add(pidfd)
            if _has_mark(entry.path, mark):  # the process ID may have been reused before the pidfd was opened
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    return killed


def _has_mark(process: str, mark: str) -> bool:
    """Whether a process has this mark. The environment of ended and foreign processes is not readable."""
    try:
        return f"{ENV_PROCESS_MARK}={mark}".encode() in Path(process, "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def own_program(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package.

    `-P` removes the working directory from the module path: otherwise a user's `queue.py` there would be imported.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def is_child(pid: int) -> bool:
    """Whether this process has a `Child` of that ID whose status is not collected yet."""
    return pid in _unreaped


def die_with(parent: int) -> None:
    """End with the parent, even if it has ended already. Safe between fork and exec."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def adopt_orphans(enabled: bool) -> None:
    """Become the parent of descendants whose parent ends. PID 1 always is."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0)


def _start(
    argv: Sequence[str], environ: Mapping[str, str], *, piped_stdout: bool, pass_fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def before_exec() -> None:
        os.nice(_NICE)
        die_with(parent)

    try:
        return subprocess.Popen(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped_stdout else None,
            stderr=subprocess.PIPE,
            process_group=0,
            pass_fds=pass_fds,
            preexec_fn=before_exec,  # noqa: PLW1509  (three calls into libc, prepared before the fork)
        )
    except OSError as error:
        raise SpawnError(f"cannot start {argv[0]!r}: {error.strerror}; pass a program after '--'") from error


def _copy(source: io.BufferedReader, target: int | None, prefix: str, tail: deque[str] | None) -> None:
    """Copy on a separate thread, so that a slow reader of the output does not block the event loop.

    Output that cannot be written, for example on a full disk, is discarded: a pipe without a reader would end the
    child.
    """
    mark, rest = prefix.encode(), b""
    with source, contextlib.suppress(OSError, ValueError):
        while piece := source.readline(_PIECE_BYTES) if mark else source.read1(_PIECE_BYTES):
            if target is not None:
                with contextlib.suppress(OSError):
                    _write_all(target, mark + piece)
            if tail is not None:
                *lines, rest = (rest + piece).split(b"\n")
                tail.extend(_readable(line) for line in lines)
                rest = rest[-_TAIL_LINE_BYTES:]
    if tail is not None and rest:
        tail.append(_readable(rest))


def _readable(line: bytes) -> str:
    return line[:_TAIL_LINE_BYTES].decode(errors="replace").rstrip("\r")


def _write_all(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread, _ in itertools.product(threads, range(_DRAIN_LOOKS)):
        thread.join(_DRAIN_SECONDS)


class Reaper:
    """Reaps orphans that this process received as PID 1 (or as subreaper), but never one of its own children.

    It checks before it reaps (WNOWAIT), and leaves its own children to their `Child`.
    """

    def __init__(self, is_ours: Callable[[int], bool]) -> None:
        self._is_ours = is_ours

    def reap(self) -> list[int]:
        """Reap every ended orphan. Stop at a child of this process, whose `Child` reaps it."""
        reaped: list[int] = []
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return reaped
            if info is None or self._is_ours(info.si_pid):
                return reaped
            with contextlib.suppress(ChildProcessError):
                os.waitpid(info.si_pid, os.WNOHANG)
                reaped.append(info.si_pid)
