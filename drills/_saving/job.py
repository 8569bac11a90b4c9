"""A real `holdfast run` on this host, the records of its script, and ways to inject faults into it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.cli.support import child_process
from holdfast.fault_injection.step_trace import JsonLines
from holdfast.launcher.host.run_dir import STATUS_FILE

SCRIPT = Path(__file__).with_name("train.py")
RUN = "drill"
DEADLINE = 120.0
_MEMORY = Path("/dev/shm")  # noqa: S108  (the folder made there is the job's own)

Pair = tuple[int, int]


class DrillError(Exception):
    """A condition did not hold in time. The message has the end of the job's log."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """One record of the script."""

    at: float
    do: str
    rank: int
    pid: int
    pair: Pair
    step: int
    digest: str
    generators: str
    durable: int
    samples: tuple[int, ...]

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Note:
        """Parse a record."""
        return cls(**{**line, "pair": tuple(line["pair"]), "samples": tuple(line["samples"])})


@dataclass
class Book:
    """All records so far. Pure."""

    digests: dict[int, set[str]] = field(default_factory=dict)
    """The digests that any rank had or saved at a step: one, if repeated steps give equal results."""
    generators: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    """The digests of the generators after a step, by step and rank."""
    samples: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    """By step and rank, the last time that the step was trained."""
    begun: dict[Pair, dict[int, Note]] = field(default_factory=dict)
    made: dict[Pair, dict[int, Note]] = field(default_factory=dict)
    count: dict[Pair, int] = field(default_factory=dict)
    """The steps that rank 0 trained in a world."""
    first: dict[Pair, float] = field(default_factory=dict)
    """The time of a world's first step."""
    newest: int = 0
    """The newest step that was trained."""
    durable: int = 0
    """The newest step that any rank reported as durable."""
    parted: list[int] = field(default_factory=list)
    """Steps that were trained again with another result."""

    def add(self, note: Note) -> None:
        """Add one record."""
        self.durable = max(self.durable, note.durable)
        match note.do:
            case "begin":
                self.begun.setdefault(note.pair, {})[note.rank] = note
            case "saved" if note.step:
                self._add_digest(note)
            case "made":
                self.generators.setdefault((note.step, note.rank), set()).add(note.generators)
                self._add_digest(note)
                self._add_made(note)

    def _add_digest(self, note: Note) -> None:
        known = self.digests.setdefault(note.step, set())
        if known and note.digest not in known:
            self.parted.append(note.step)
        known.add(note.digest)

    def _add_made(self, note: Note) -> None:
        self.made.setdefault(note.pair, {})[note.rank] = note
        self.samples.setdefault(note.step, {})[note.rank] = note.samples
        self.first.setdefault(note.pair, note.at)
        self.newest = max(self.newest, note.step)
        if note.rank == 0:
            self.count[note.pair] = self.count.get(note.pair, 0) + 1

    @property
    def pair(self) -> Pair:
        """The newest world in which a rank began."""
        return max(self.begun, default=(0, 0))

    @property
    def reached(self) -> int:
        """The newest step of the newest world."""
        pair = self.pair
        notes = [*self.begun.get(pair, {}).values(), *self.made.get(pair, {}).values()]
        return max((note.step for note in notes), default=0)

    def trains(self, size: int, steps: int, *, above: Pair = (0, 0), since: float = 0.0) -> bool:
        """Return whether a world above `above` trained this many steps, all ranks the last one after `since`."""
        pair = self.pair
        made = self.made.get(pair, {})
        at_work = len(made) == size and min(note.at for note in made.values()) > since
        return pair > above and at_work and self.count.get(pair, 0) >= steps


class Job:
    """One job. Its launcher may be killed and started again with the same folders, as a container is."""

    def __init__(
        self,
        folder: Path,
        *,
        processes: int = 2,
        checkpoints: Path | None = None,
        words: Sequence[str] = (),
        **environ: str,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.processes, self.words, self.environ = processes, tuple(words), environ
        self.checkpoints = checkpoints or folder / "checkpoints"
        self.run_dir = Path(tempfile.mkdtemp(prefix="holdfast-drill-", dir=_MEMORY if _MEMORY.is_dir() else None))
        self.log, self._notes_file = folder / "log", folder / "notes.jsonl"
        self._lines, self.book = JsonLines(self._notes_file), Book()
        self.launcher: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self) -> None:
        """Start the launcher."""
        self.starts += 1
        words = [f"--nproc-per-node={self.processes}", f"--rdzv-id={RUN}", "--max-restarts=1000000", *self.words]
        own = {
            "HOLDFAST_RUN_DIR": str(self.run_dir),
            "HOLDFAST_CHECKPOINT_DIR": str(self.checkpoints),
            "DRILL_NOTES": str(self._notes_file),
            "OMP_NUM_THREADS": "1",
            **self.environ,
        }
        argv = [sys.executable, "-m", "holdfast", "run", *words, "--", sys.executable, str(SCRIPT)]
        self.launcher = child_process.start(argv, environ={**os.environ, **own}, log=self.log)

    @property
    def pid(self) -> int:
        """The PID of the launcher."""
        if self.launcher is None:
            raise AssertionError("the job was not started")
        return self.launcher.pid

    @property
    def status(self) -> dict[str, Any]:
        """Return the launcher's status; empty before it writes one."""
        try:
            found: dict[str, Any] = json.loads((self.run_dir / STATUS_FILE).read_bytes())
        except FileNotFoundError:
            return {}
        return found

    def read(self) -> Book:
        """Read new records, and return all."""
        for line in self._lines.read_new():
            self.book.add(Note.of(line))
        return self.book

    def await_steps(self, steps: int, *, above: Pair = (0, 0), since: float = 0.0, restart: bool = True) -> Book:
        """Wait until a world above `above` trains. A launcher that has exited is started again, as a kubelet does."""

        def trains() -> bool:
            if restart and self.launcher is not None and self.launcher.poll() is not None:
                self.start()
            return self.read().trains(self.processes, steps, above=above, since=since)

        self.wait(trains, f"{steps} steps of {self.processes} ranks in a world above {above}")
        return self.book

    def await_words(self, words: str, *, since: int = 0) -> None:
        """Wait until these words are in the log after the offset `since`."""
        self.wait(lambda: words in self.said(since), f"{words!r} in the log")

    def said(self, since: int = 0) -> str:
        """Return the log from an offset on."""
        return self.log.read_bytes()[since:].decode(errors="replace")

    def wait(self, until: Callable[[], bool], what: str, deadline: float = DEADLINE) -> None:
        """Wait until the condition holds. Raises DrillError after the deadline."""
        end = time.monotonic() + deadline
        while not until():
            if time.monotonic() > end:
                raise DrillError(f"not within {deadline:.0f} s: {what}; the log ends with\n{self.said()[-2000:]}")
            time.sleep(0.005)

    def finish(self) -> int:
        """Wait for the job's end, and return the exit code."""
        if self.launcher is None:
            raise AssertionError("the job was not started")
        self.wait(lambda: self.launcher is not None and self.launcher.poll() is not None, "the end of the job")
        self.read()
        return self.launcher.returncode

    def kill(self) -> None:
        """Send SIGKILL to the launcher. Its ranks end with it."""
        if self.launcher is not None:
            family = descendants(self.pid)
            self.launcher.kill()
            self.launcher.wait()
            self.wait(lambda: all(map(is_dead, family)), "the launcher's processes to end with it")
            self.read()

    def close(self) -> None:
        """End all processes and remove the job's folder in memory."""
        try:
            self.kill()
        finally:
            shutil.rmtree(self.run_dir, ignore_errors=True)


@contextlib.contextmanager
def running(folder: Path, **how: Any) -> Iterator[Job]:
    """Start a job, and remove it afterwards."""
    job = Job(folder, **how)
    try:
        job.start()
        yield job
    finally:
        job.close()


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[list[int]]:
    """Stop the launcher and all its descendants; continue the surviving ones afterwards."""
    signal_to([pid], signal.SIGSTOP)  # no new processes start from here
    below = descendants(pid)
    signal_to(below, signal.SIGSTOP)
    late = [one for one in descendants(pid) if one not in below]  # forked meanwhile by one of them
    signal_to(late, signal.SIGSTOP)
    try:
        _await_still([pid, *below, *late])
        yield [*below, *late]
    finally:
        signal_to([*late, *below, pid], signal.SIGCONT)


def _await_still(pids: Sequence[int]) -> None:
    """Wait until all threads have finished their system calls."""
    end = time.monotonic() + DEADLINE
    while not all(map(_is_still, pids)):
        if time.monotonic() > end:
            raise DrillError(f"not all of {pids} can be stopped")
        time.sleep(0.001)


def _is_still(pid: int) -> bool:
    try:
        threads = [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return True
    states = [words[0] for words in map(_stat, threads) if words]
    return all(state in "TtZX" for state in states)


def signal_to(pids: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """Return the descendants of a process, without itself."""
    parents = dict(filter(None, map(_parent, _pids())))
    found, rest = list[int](), [pid]
    while rest:
        above = rest.pop()
        below = [child for child, parent in parents.items() if parent == above]
        found += below
        rest += below
    return found


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _parent(pid: int) -> tuple[int, int] | None:
    words = _stat(pid)
    return (pid, int(words[1])) if words else None


def is_dead(pid: int) -> bool:
    """Return whether the process is gone, or a zombie."""
    words = _stat(pid)
    return not words or words[0] in "ZX"
