"""Programs and folders that end with this process, however it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from holdfast.core.errors import SpawnError
from holdfast.launcher.process.child import die_with

# Removes the folder when the pipe to its owner closes, which happens even after SIGKILL.
_SWEEPER = 'cat >/dev/null; for n in $(seq 100); do rm -rf -- "$1" && exit; sleep 0.3; done'


def start(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    log: Path | None = None,
    stdin: int | None = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start a program in its own session. It writes to the log, or to the output of this process."""
    parent = os.getpid()

    with contextlib.ExitStack() as stack:
        output = None if log is None else stack.enter_context(log.open("ab"))
        try:
            return subprocess.Popen(
                argv,
                env=dict(environ),
                stdin=stdin,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=lambda: die_with(parent),  # noqa: PLW1509  (two calls into libc, prepared before the fork)
            )
        except OSError as error:
            raise SpawnError(f"cannot start {argv[0]!r}: {error.strerror}") from error


@contextlib.contextmanager
def swept_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder, which is removed afterwards even if this process is killed."""
    path = Path(tempfile.mkdtemp(prefix=prefix))
    sweeper = subprocess.Popen(
        ["/bin/sh", "-c", _SWEEPER, "sh", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if sweeper.stdin is not None:
            sweeper.stdin.close()
        sweeper.wait()
