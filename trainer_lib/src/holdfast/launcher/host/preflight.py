"""Checks whether checkpoint volume and object store are usable. Runs asynchronously to the launcher's start.

The launcher runs the checks, not the sidecar, because it has the trainer's user, mounts, variables and permissions. A
volume that hangs blocks only one thread here; the sidecar reports that no result arrives. A separate process checks
the store, so the launcher does not import the store's client. A failed check is repeated. The results are in a file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from holdfast.checkpoint.io.durable_files import create_durably, make_folder, move_exclusively, sync_folder
from holdfast.core.environment import Environment, helper_environment
from holdfast.core.protocol import PROTOCOL_VERSION
from holdfast.core.settings import format_size
from holdfast.launcher.host.run_dir import PREFLIGHT_FILE, write_json
from holdfast.launcher.process.child import own_program

_log = logging.getLogger("holdfast.launcher.preflight")
STORAGE: Final = "Storage"
OBJECT_STORE: Final = "ObjectStore"
TRIAL_BYTES: Final = 8 << 20
PIECE_BYTES: Final = 1 << 20
_RETRY_SECONDS: Final = 20.0


class Result(StrEnum):
    RUNNING = "Running"
    PASSED = "Passed"
    FAILED = "Failed"
    SKIPPED = "Skipped"


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check, with a message for users."""

    result: Result
    message: str
    concerns_job: bool = False
    """The check failed because of the job's settings, for example wrong credentials, and not because of the node."""

    def document(self, name: str) -> dict[str, Any]:
        """Return one entry of `preflight.json`."""
        found = {"name": name, "result": str(self.result), "message": self.message}
        return {**found, "blame": "Job"} if self.concerns_job else found


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The job's requirements on the volume."""

    free_bytes: int
    write_bytes: int
    """The minimum throughput, in bytes per second."""
    seconds: float
    """The maximum duration of the check in seconds."""


class Volume(Protocol):
    """The operations of a check on a volume."""

    def free_bytes(self) -> int | None:
        """Return the bytes that this user can still write; None if the volume does not report them."""
        ...

    def write(self, piece: bytes) -> None:
        """Append to the file of the check."""
        ...

    def sync(self) -> None:
        """Flush the file to the volume."""
        ...

    def use_names(self) -> None:
        """Use file names as checkpoints do. An OSError names the unsupported operation."""
        ...

    def remove(self) -> None:
        """Delete everything that the check created."""
        ...


class Folder:
    """A folder of the file system, with a file for this check."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._path = folder / f".preflight-{name}"
        self._fd = -1

    def free_bytes(self) -> int | None:
        found = os.statvfs(self._folder)
        return found.f_bavail * found.f_frsize if found.f_blocks else None

    def write(self, piece: bytes) -> None:
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        rest = memoryview(piece)
        while rest.nbytes:
            rest = rest[os.write(self._fd, rest) :]

    def sync(self) -> None:
        os.fsync(self._fd)

    def use_names(self) -> None:
        before, after = self._path.with_name(f"{self._path.name}.tmp"), self._path.with_name(f"{self._path.name}.d")
        steps: dict[str, Callable[[], object]] = {
            "make a folder": lambda: make_folder(before),
            "write a file": lambda: create_durably(before / "new", b""),
            "give a file a name that no other file has": lambda: move_exclusively(before / "new", before / "claim"),
            "fsync a folder": lambda: sync_folder(before),
            "rename a folder": lambda: before.rename(after),
        }
        self._clear(before, after)  # of an earlier check that was killed
        try:
            for what, do in steps.items():
                with _naming(what):
                    do()
        finally:
            self._clear(before, after)

    @staticmethod
    def _clear(*folders: Path) -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Add the failed operation to an error."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot {what}: {os.strerror(error.errno or 0)}") from error


def try_volume(volume: Volume, needs: Needs, monotonic: Callable[[], float]) -> Check:
    """Check the free space, write and sync a small file, then use file names as checkpoints do."""
    try:
        free = volume.free_bytes()
        if free is not None and free < needs.free_bytes:
            return _failed(
                f"{format_size(free)} are free on the checkpoint volume, {format_size(needs.free_bytes)} are"
                " required: delete files, or lower preflight.storage.minFreeBytes"
            )
        try:
            return _timed(volume, needs, monotonic, free)
        finally:
            volume.remove()
    except OSError as error:
        return _failed(f"the checkpoint volume cannot be written: {_why(error)}")


def _timed(volume: Volume, needs: Needs, monotonic: Callable[[], float], free: int | None) -> Check:
    piece, started = os.urandom(PIECE_BYTES), monotonic()
    for written in range(0, TRIAL_BYTES, PIECE_BYTES):
        if monotonic() - started > needs.seconds:
            outcome = (
                f"only {format_size(written)} were written to the checkpoint volume within {needs.seconds:.0f} s"
            )
            return _failed(outcome)
        volume.write(piece)
    volume.sync()
    pace = TRIAL_BYTES / max(monotonic() - started, 1e-3)
    volume.use_names()
    if pace < needs.write_bytes:
        return _failed(
            f"the checkpoint volume writes {format_size(pace)}/s, {format_size(needs.write_bytes)}/s are required"
            " (preflight.storage.minWriteBytesPerSecond)"
        )
    free_text = "" if free is None else f"{format_size(free)} are free, "
    return Check(result=Result.PASSED, message=f"{free_text}{format_size(pace)}/s are written")


def _failed(message: str) -> Check:
    return Check(result=Result.FAILED, message=message)


def _why(error: OSError) -> str:
    advice = {errno.EACCES: "; let the trainer's user write there", errno.ENOSPC: "; delete files"}
    return f"{error.strerror}{advice.get(error.errno or 0, '')}"


def try_store(command: Sequence[str], seconds: float) -> Check:
    """Run the check of the object store (`object_store_probe`) in a separate process."""
    environ = helper_environment()
    try:
        ended = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _failed(f"the object store has not answered within {seconds:.0f} s")
    except OSError as error:
        return _failed(f"the object store check cannot start: {error.strerror}")
    return _to_check(ended)


def _to_check(ended: subprocess.CompletedProcess[bytes]) -> Check:
    """Return the last line. The exit code is not reliable: as PID 1, the launcher may have reaped the process."""
    try:
        outcome = json.loads(ended.stdout.decode().splitlines()[-1])
        result = Result(outcome["result"])
        return Check(result=result, message=str(outcome["message"]), concerns_job=bool(outcome["ofTheJob"]))
    except (ValueError, LookupError, TypeError):
        output = (ended.stderr.decode(errors="replace").splitlines() or ["it wrote no error"])[-1]
        return _failed(f"the object store check failed: {output}")


class Board:
    """The state of all checks in `preflight.json`. Any thread may update it."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / PREFLIGHT_FILE
        self._lock = threading.Lock()
        self._checks: dict[str, Check] = {}

    def report(self, name: str, check: Check) -> bool:
        """Write a result if it changed. Return whether the file contains it."""
        with self._lock:
            if check == self._checks.get(name):
                return True
            level = logging.WARNING if check.result is Result.FAILED else logging.INFO
            _log.log(level, "preflight: %s: %s: %s", name, check.result, check.message)
            checks = {**self._checks, name: check}
            try:
                write_json(self._path, document(checks))
            except OSError as error:
                _log.error("cannot write %s: %s; the operator does not get the result", self._path, error.strerror)
                return False
            self._checks = checks
            return True


def document(checks: Mapping[str, Check]) -> dict[str, Any]:
    return {"version": PROTOCOL_VERSION, "checks": [check.document(name) for name, check in checks.items()]}


class Trial:
    """Repeats a check until it succeeds, and publishes each result."""

    def __init__(
        self,
        board: Board,
        name: str,
        attempt: Callable[[], Check],
        *,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._board, self._name, self._attempt = board, name, attempt
        self._sleep = sleep

    def begin(self, words: str) -> None:
        """Publish that the check runs, then run it on a separate thread."""
        self._board.report(self._name, Check(result=Result.RUNNING, message=words))
        threading.Thread(target=self.run, name=f"preflight-{self._name}", daemon=True).start()

    def run(self) -> None:
        """Repeat until the check has succeeded and the result is written: the worker waits for it."""
        while True:
            check = self._tried()
            if self._board.report(self._name, check) and check.result is not Result.FAILED:
                return
            self._sleep(_RETRY_SECONDS)

    def _tried(self) -> Check:
        try:
            return self._attempt()
        except Exception as error:  # noqa: BLE001 — the worker waits for a result
            _log.exception("preflight: %s: the check itself failed", self._name)
            return _failed(f"the check itself failed: {error!r}")


def start(environment: Environment) -> None:
    """Start the checks that the job requires."""
    if environment.run_dir is None:
        return
    needs = _needs(environment)
    if needs is None and not environment.preflight_object:
        return
    environment.run_dir.mkdir(parents=True, exist_ok=True)
    board = Board(environment.run_dir)
    if needs is not None:
        _start_volume(board, environment, needs)
    if environment.preflight_object:
        _start_store(board, environment, environment.object_url or environment.checkpoint_url)


def _needs(environment: Environment) -> Needs | None:
    free, pace = environment.preflight_free_bytes, environment.preflight_write_bytes
    if free is None or pace is None:
        return None
    return Needs(free_bytes=free, write_bytes=pace, seconds=environment.preflight_seconds)


def _start_volume(board: Board, environment: Environment, needs: Needs) -> None:
    if environment.checkpoint_folder is None:
        board.report(STORAGE, Check(result=Result.SKIPPED, message="there is no checkpoint volume"))
        return
    volume = Folder(environment.checkpoint_folder, environment.pod_name or environment.pod_uid)
    Trial(board, STORAGE, lambda: try_volume(volume, needs, time.monotonic)).begin("checking the checkpoint volume")


def _start_store(board: Board, environment: Environment, url: str) -> None:
    if not url:
        board.report(OBJECT_STORE, Check(result=Result.SKIPPED, message="there is no object store"))
        return
    name = environment.pod_name or environment.pod_uid
    command = own_program("holdfast.launcher.host.object_store_probe", url, name)
    attempt = partial(try_store, command, environment.preflight_seconds)
    Trial(board, OBJECT_STORE, attempt).begin("checking the object store")
