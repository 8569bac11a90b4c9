"""Processes that are recorded before they run. Only recorded ones are ever killed.

Invariant: each running process of the testbed has a record of its PID and start time. It holds even if the testbed is
killed at any point: the process writes its own record and only then becomes the program (`exec` keeps both values).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast_testbed.errors import NotReadyError
from holdfast_testbed.settings import child_environment
from holdfast_testbed.waiting import wait_for

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
# PyDLL keeps the interpreter's lock, because no other thread may run between fork and exec.
_prctl = ctypes.PyDLL(None).prctl
# $1 is the record, $2 the log. If the folder is missing (the cluster is being removed), it exits before the program
# starts.
_STUB = (
    'IFS= read -r stat </proc/$$/stat && printf "%s\\n" "$stat" >"$1" || exit 1; '
    'exec </dev/null >>"$2" 2>&1; shift 2; exec "$@"'
)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One process of this boot. A PID alone may belong to another process later."""

    pid: int
    start: int
    """Clock ticks since boot, field 22 of `/proc/PID/stat`."""


@dataclass(frozen=True, kw_only=True)
class Stat:
    """The fields of `/proc/PID/stat` that matter here."""

    pid: int
    name: str
    state: str
    parent: int
    start: int

    @property
    def identity(self) -> Identity:
        """Return the identity of the process."""
        return Identity(pid=self.pid, start=self.start)


def parse_stat(line: str) -> Stat:
    """Parse a line of `/proc/PID/stat`. The command in parentheses may contain spaces and parentheses."""
    pid, rest = line.split(" (", 1)
    name, numbers = rest.rsplit(") ", 1)
    fields = numbers.split()
    return Stat(pid=int(pid), name=name, state=fields[0], parent=int(fields[1]), start=int(fields[19]))


def look(pid: int) -> Stat | None:
    """Return the process with this PID, or None."""
    try:
        return parse_stat((_PROC / str(pid) / "stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None


def alive(identity: Identity | None) -> bool:
    """Return whether this process still runs; a zombie does not."""
    if identity is None:
        return False
    stat = look(identity.pid)
    return stat is not None and stat.start == identity.start and stat.state not in "ZX"


def send(identity: Identity | None, number: int) -> bool:
    """Signal this process. Return False if it is gone."""
    if identity is None or not alive(identity):
        return False
    try:
        os.kill(identity.pid, number)
    except ProcessLookupError:
        return False
    return True


def read_record(path: Path) -> Identity | None:
    """Return the recorded process; None without a record."""
    try:
        line = path.read_text()
    except FileNotFoundError:
        return None
    return parse_stat(line).identity if line.endswith("\n") else None


def start(
    name: str,
    argv: Sequence[str | Path],
    *,
    records: Path,
    logs: Path,
    environment: Mapping[str, str] | None = None,
    seconds: float = 60.0,
) -> Identity:
    """Start a daemon in its own session, not as a child, with its record in `records` and its output in `logs`."""
    record = records / name
    record.unlink(missing_ok=True)
    log = logs / f"{name}.log"
    words = [str(word) for word in argv]
    subprocess.run(
        ["setsid", "--fork", "/bin/sh", "-c", _STUB, "holdfast-testbed", str(record), str(log), *words],
        check=True,
        env=child_environment(**(environment or {})),
    )
    wait_for(lambda: read_record(record) is not None, what=f"{name} is started", seconds=seconds, every=0.005)
    identity = read_record(record)
    if identity is None:
        raise NotReadyError(f"{name} has no record")
    return identity


def kill_all(identities: Sequence[Identity]) -> None:
    """Send SIGKILL to these processes and wait until all are gone."""
    for identity in identities:
        send(identity, signal.SIGKILL)
    wait_for(
        lambda: not any(alive(identity) for identity in identities),
        what=f"killed processes {[i.pid for i in identities if alive(i)]} are gone",
        seconds=30,
    )


def die_with_parent() -> None:
    """A `preexec_fn` with which the kernel kills a child when the thread that started it ends, for any reason."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a child process, by force if it does not end in time."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def children(identity: Identity) -> list[Identity]:
    """Return the running children of a process."""
    return [stat.identity for stat in everything() if stat.parent == identity.pid]


def command_line(pid: int) -> list[str]:
    """Return the command line of a process; empty if it is gone."""
    try:
        raw = (_PROC / str(pid) / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [word.decode(errors="replace") for word in raw.split(b"\0")[:-1]]


def tail(log: Path) -> str:
    """Return the end of a log, for an error message."""
    try:
        text = log.read_text(errors="replace")
    except FileNotFoundError:
        return f"({log} does not exist)"
    return "\n".join([f"the end of {log}:", *text.splitlines()[-15:]])


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process in a pod, by the host's PIDs."""

    pid: int
    ppid: int
    start: int
    name: str
    """Return its name in `ps`."""
    cmdline: tuple[str, ...]
    container: str
    """Name of its container; empty for the pod's sandbox."""

    @property
    def identity(self) -> Identity:
        """Return the identity of the process."""
        return Identity(pid=self.pid, start=self.start)


def everything() -> list[Stat]:
    """Return all processes that run now."""
    stats = [look(int(entry.name)) for entry in _PROC.iterdir() if entry.name.isdigit()]
    return [stat for stat in stats if stat is not None and stat.state not in "ZX"]
