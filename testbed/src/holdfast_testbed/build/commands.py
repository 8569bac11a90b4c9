"""Runs short programs."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast_testbed.errors import CommandFailedError, MissingProgramError
from holdfast_testbed.settings import child_environment


def run(
    argv: Sequence[str | Path],
    *,
    stdin: str | None = None,
    cwd: Path | None = None,
    timeout: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a program and return its standard output. A failure includes the program's output."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            cwd=cwd,
            timeout=timeout,
            env=child_environment(**(environment or {})),
        )
    except FileNotFoundError as error:
        raise MissingProgramError(f"{words[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise CommandFailedError(f"{' '.join(words)}: not finished after {timeout:.0f} s") from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-4000:]
        raise CommandFailedError(f"{' '.join(words)} ended with {done.returncode}: {said}")
    return done.stdout
