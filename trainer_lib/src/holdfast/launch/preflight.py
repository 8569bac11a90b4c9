"""Is the checkpoint volume fit for training? Tried beside the launcher's start, and told to the sidecar in a file.

The launcher tries it and not the sidecar, as it has the trainer's user, mounts and rights. A volume that hangs keeps
only the thread here waiting; the sidecar sees that no answer comes, and says so. What was found unfit is tried again.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol

from holdfast.constants import PREFLIGHT_FILE, PROTOCOL_VERSION
from holdfast.environment import Environment
from holdfast.launch.files import write_json

_log = logging.getLogger("holdfast.launch.preflight")
STORAGE: Final = "Storage"
TRIAL_BYTES: Final = 8 << 20
PIECE_BYTES: Final = 1 << 20
_RETRY_SECONDS: Final = 20.0
_UNITS: Final = (("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20))


class Result(StrEnum):
    """How a check stands."""

    RUNNING = "Running"
    PASSED = "Passed"
    FAILED = "Failed"
    SKIPPED = "Skipped"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check, in words for people."""

    result: Result
    message: str

    def document(self) -> dict[str, Any]:
        """`preflight.json`."""
        found = {"name": STORAGE, "result": str(self.result), "message": self.message}
        return {"version": PROTOCOL_VERSION, "checks": [found]}


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the job asks of the volume."""

    free_bytes: int
    write_bytes: int
    """A second."""
    seconds: float
    """The longest that the trial may take."""


class Volume(Protocol):
    """What a trial does with a volume."""

    def free_bytes(self) -> int | None:
        """What a user may still write; None if the volume does not say."""
        ...

    def write(self, piece: bytes) -> None:
        """Append to the trial's file."""
        ...

    def sync(self) -> None:
        """Wait until the volume has all of it."""
        ...

    def remove(self) -> None:
        """Take the trial's file away."""
        ...


class Folder:
    """A real one, with a file of the trial's own."""

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

    def remove(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._path.unlink(missing_ok=True)


def try_volume(volume: Volume, needs: Needs, monotonic: Callable[[], float]) -> Check:
    """Look for room, then write and sync a little."""
    try:
        free = volume.free_bytes()
        if free is not None and free < needs.free_bytes:
            return _failed(
                f"{_size(free)} are free on the checkpoint volume, {_size(needs.free_bytes)} are asked for: free"
                " some, or lower preflight.storage.minFree"
            )
        try:
            return _timed(volume, needs, monotonic, free)
        finally:
            volume.remove()
    except OSError as error:
        return _failed(f"the checkpoint volume cannot be written: {_why(error)}")


def _timed(volume: Volume, needs: Needs, monotonic: Callable[[], float], free: int | None) -> Check:
    piece, begun = os.urandom(PIECE_BYTES), monotonic()
    for written in range(0, TRIAL_BYTES, PIECE_BYTES):
        if monotonic() - begun > needs.seconds:
            told = f"the checkpoint volume took {_size(written)} in {needs.seconds:.0f} s, and was given up"
            return _failed(told)
        volume.write(piece)
    volume.sync()
    pace = TRIAL_BYTES / max(monotonic() - begun, 1e-3)
    if pace < needs.write_bytes:
        return _failed(
            f"the checkpoint volume takes {_size(pace)} a second, {_size(needs.write_bytes)} are asked for"
            " (preflight.storage.minWritePerSecond)"
        )
    room = "" if free is None else f"{_size(free)} are free, "
    return Check(result=Result.PASSED, message=f"{room}{_size(pace)} a second are written")


def _failed(message: str) -> Check:
    return Check(result=Result.FAILED, message=message)


def _why(error: OSError) -> str:
    mend = {errno.EACCES: "; give the trainer's user the right to write there", errno.ENOSPC: "; free some"}
    return f"{error.strerror}{mend.get(error.errno or 0, '')}"


def _size(count: float) -> str:
    """As people write it."""
    for suffix, unit in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f}".removesuffix(".0") + suffix
    return f"{count / 1024:.0f}Ki"


class Trial:
    """Tries until the volume is fit, and tells what it found each time that it changes."""

    def __init__(
        self,
        run_dir: Path,
        needs: Needs,
        volume: Volume | None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._path = run_dir / PREFLIGHT_FILE
        self._needs, self._volume = needs, volume
        self._monotonic, self._sleep = monotonic, sleep
        self._told: Check | None = None

    def begin(self) -> None:
        """Say that it runs, then run on a thread of its own."""
        if self._volume is None:
            self._tell(Check(result=Result.SKIPPED, message="there is no checkpoint volume"))
            return
        self._tell(Check(result=Result.RUNNING, message="the checkpoint volume is tried"))
        threading.Thread(target=self.run, args=(self._volume,), name="preflight", daemon=True).start()

    def run(self, volume: Volume) -> None:
        """Until it is fit."""
        while True:
            check = try_volume(volume, self._needs, self._monotonic)
            self._tell(check)
            if check.result is not Result.FAILED:
                return
            self._sleep(_RETRY_SECONDS)

    def _tell(self, check: Check) -> None:
        if check == self._told:
            return
        level = logging.WARNING if check.result is Result.FAILED else logging.INFO
        _log.log(level, "preflight: %s: %s", check.result, check.message)
        try:
            write_json(self._path, check.document())
        except OSError as error:
            _log.error("cannot write %s: %s; the operator waits for it in vain", self._path, error.strerror)
            return
        self._told = check


def start(environment: Environment) -> None:
    """Begin, if the job asks for it."""
    free, pace = environment.preflight_free_bytes, environment.preflight_write_bytes
    if free is None or pace is None or environment.run_dir is None:
        return
    environment.run_dir.mkdir(parents=True, exist_ok=True)
    folder = environment.checkpoint_dir
    volume = None if folder is None else Folder(folder, environment.pod_name or environment.pod_uid)
    needs = Needs(free_bytes=free, write_bytes=pace, seconds=environment.preflight_seconds)
    Trial(environment.run_dir, needs, volume).begin()
