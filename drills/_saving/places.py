"""Jobs on disks that are full, read-only or without O_DIRECT, and on hosts whose clocks differ.

Each drill reports what was lost, whether the user got a clear message, and whether the job continued. If a file
system cannot be mounted, the drill reports the reason and is skipped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from _saving.job import Job, frozen, running
from _saving.kills import WrongBits, look
from holdfast.checkpoint.folder.catalog import list_commits

WIDTH = 4000  # 6 MB of state
_SKEW = Path(__file__).with_name("skew")
_DAY = 86400


class CannotError(Exception):
    """This machine cannot provide such a disk."""


@dataclass(kw_only=True)
class Outcome:
    """The result of a drill."""

    lost: int = 0
    failures: list[str] = field(default_factory=list)
    told: str = ""
    """The message that the user reads."""

    def expect(self, true: bool, failure: str) -> None:
        """Add a failure unless the condition is true."""
        if not true:
            self.failures.append(failure)


@contextlib.contextmanager
def mounted(folder: Path, *words: str) -> Iterator[Path]:
    """Mount a separate file system."""
    folder.mkdir(parents=True)
    done = subprocess.run(["mount", *words, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotError(f"cannot mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@contextlib.contextmanager
def loop_disk(folder: Path, mib: int) -> Iterator[Path]:
    """Mount an ext4 of this many MiB in a file."""
    image = folder / "disk.img"
    folder.mkdir(parents=True, exist_ok=True)
    with image.open("wb") as file:
        file.truncate(mib << 20)
    try:
        made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise CannotError("there is no mkfs.ext4") from error
    if made.returncode:
        raise CannotError(f"mkfs.ext4: {made.stderr.strip()}")
    with mounted(folder / "disk", "-o", "loop", str(image)) as disk:
        yield disk


def _job(folder: Path, checkpoints: Path, **environ: str) -> contextlib.AbstractContextManager[Job]:
    words = ["--checkpoint-interval=2", "--checkpoint-keep=2", "--warm-processes=none"]
    return running(folder, checkpoints=checkpoints, words=words, DRILL_WIDTH=str(WIDTH), DRILL_PACE="0.02", **environ)


def full(folder: Path) -> Outcome:
    """Fill the disk under a job's saves, and free it after three have failed."""
    with loop_disk(folder, 64) as disk, _job(folder / "job", disk / "commits") as job:
        job.await_steps(10)

        def fill() -> None:
            free = os.statvfs(disk)
            with (disk / "ballast").open("wb") as file, contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - (2 << 20)))

        return _trouble(job, fill, (disk / "ballast").unlink, "No space left on device")


def read_only(folder: Path) -> Outcome:
    """Make the file system read-only, as after a disk error, and repair it after three failed saves."""
    with loop_disk(folder, 64) as disk, _job(folder / "job", disk / "commits") as job:
        job.await_steps(10)

        def remount(how: str) -> None:
            command = ["mount", "-o", f"remount,{how}", str(disk)]
            job.wait(  # busy while a file is open for writing
                lambda: not subprocess.run(command, capture_output=True, check=False).returncode, f"remount,{how}"
            )

        return _trouble(job, lambda: remount("ro"), lambda: remount("rw"), "Read-only file system")


def _trouble(job: Job, begin: Callable[[], object], end: Callable[[], object], words: str) -> Outcome:
    """Check that three saves fail with reason and fix, the attempt continues, and later saves succeed."""
    outcome = Outcome()
    size = job.log.stat().st_size
    begin()
    job.await_words("3 in a row", since=size)
    before, made = job.read().pair, job.book.reached
    with frozen(job.pid):  # files that retention deletes meanwhile would appear corrupt
        found = look(job.checkpoints)
    said = job.said(size)
    outcome.failures += found.failures
    outcome.expect(words in said, f"the user does not read {words!r}")
    outcome.expect("make the checkpoint directory writable, with free space" in said, "no message says what to do")
    outcome.expect(found.step >= job.book.durable, f"step {job.book.durable} was durable and is gone")
    end()
    job.wait(lambda: job.read().durable > made, "a checkpoint after the fault")
    outcome.expect(job.book.pair == before, f"attempt {before} ended, though no rank had a fault")
    outcome.failures += [WrongBits(f"step {step} was made again with other bits") for step in job.book.parted]
    outcome.told = _line(said, words, job.checkpoints)
    return outcome


def _line(said: str, words: str, folder: Path) -> str:
    """Return the first line of the log with these words, without parts that depend on the machine."""
    logged = [json.loads(line)["msg"] for line in said.splitlines() if line.startswith("{")]
    told = next((line for line in logged if words in line and "could not be saved" in line), "")
    return re.sub(r"\.tmp-[0-9a-f]+", ".tmp-…", told.replace(str(folder), "…"))


def no_direct(folder: Path) -> Outcome:
    """Run a job on a file system without O_DIRECT, on which the same bytes go through the page cache."""
    with mounted(folder / "ram", "-t", "ramfs", "none") as ram:
        _check_refusal(ram / "probe")
        with _job(folder / "job", ram / "commits") as job:
            job.await_steps(10)
            before, made = job.read().pair, job.book.reached
            job.kill()
            found = look(job.checkpoints)
            outcome = Outcome(failures=list(found.failures))
            outcome.expect(found.step >= job.book.durable > 0, "a durable step is gone")
            job.start()
            job.await_steps(5, above=before)
            went_on = job.book.begun[job.book.pair][0].step
            outcome.lost = max(0, made - went_on)
            outcome.expect(
                went_on >= found.step,
                f"it continued from step {went_on}, and the checkpoint of step {found.step} was published",
            )
            return outcome


def _check_refusal(file: Path) -> None:
    fd = os.open(file, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return
        raise
    finally:
        os.close(fd)
    raise CannotError("this system's ramfs takes O_DIRECT")


def clocks(folder: Path) -> Outcome:
    """Run a job on two hosts whose clocks differ by two days, in both directions, and then not at all."""
    outcome = Outcome()
    commits, book_step = folder / "commits", 0
    for number, ahead in enumerate([(-1, 1), (1, -1), (0, 0)]):
        with _two_hosts(folder / str(number), commits, [days * _DAY for days in ahead]) as (first, second):
            first.wait(lambda a=first, b=second: _both(a, b), "two hosts that train")
            begun = next(iter(first.book.begun[first.book.pair].values()))
            outcome.expect(begun.step >= book_step, f"it went on from step {begun.step}, and {book_step} was durable")
            first.wait(lambda a=first, least=begun.step: a.read().durable > least + 10, "checkpoints of both")
            outcome.expect(len(list_commits(commits)) >= 2, "retention left fewer checkpoints than it should keep")
        made, found = first.read().reached, look(commits)
        outcome.failures += found.failures
        outcome.expect(found.step >= first.book.durable, f"step {first.book.durable} was durable and is gone")
        outcome.lost = max(outcome.lost, made - found.step)
        book_step = found.step
    return outcome


def _both(first: Job, second: Job) -> bool:
    books = [first.read(), second.read()]
    return all(book.made.get(books[0].pair) for book in books)


@contextlib.contextmanager
def _two_hosts(folder: Path, commits: Path, ahead: list[float]) -> Iterator[tuple[Job, Job]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", "--checkpoint-interval=3", "--checkpoint-keep=2"]
    words += ["--checkpoint-retention=hours=1,daily=2", "--warm-processes=none"]
    with contextlib.ExitStack() as stack:
        jobs = []
        for number, seconds in enumerate(ahead):
            path = os.pathsep.join(filter(None, [str(_SKEW), os.environ.get("PYTHONPATH", "")]))
            how = {"PYTHONPATH": path, "DRILL_SKEW_SECONDS": str(seconds), "DRILL_WIDTH": "256", "DRILL_PACE": "0.01"}
            host = running(folder / str(number), processes=1, checkpoints=commits, words=words, **how)
            jobs.append(stack.enter_context(host))
        yield jobs[0], jobs[1]


DRILLS: dict[str, Callable[[Path], Outcome]] = {
    "disk full in the middle of saves": full,
    "file system turned read-only": read_only,
    "file system without O_DIRECT": no_direct,
    "clocks of two hosts two days apart": clocks,
}
