"""The Python environment: all dependencies of the four packages, the tools, and the sources on its path."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from holdfast_testbed.errors import CommandFailedError, MissingProgramError
from holdfast_testbed.progress_output import progress, say
from holdfast_testbed.settings import child_environment, settings

PACKAGES = ("operator", "sidecar", "trainer_lib", "testbed")
_STAMP = "holdfast-stamp"
"""The digest of the last complete installation."""
_MADE = "holdfast-made"
"""Written when the bare environment is complete. An interrupted creation leaves an interpreter without pip."""


def make_venv() -> None:
    """Create or complete the environment. Nothing happens if it is up to date."""
    stamp = settings().venv / _STAMP
    wanted = stamp_of(settings().repository)
    if _read(stamp) == wanted and _works():
        return
    if not _works():
        _create()
    with progress("installing Python packages (torch is the large one)"):
        _install()
    _put_sources_on_path()
    stamp.write_text(wanted + "\n")


def stamp_of(repository: Path) -> str:
    """Return the digest of all requirements."""
    digest = hashlib.sha256(f"{sys.version_info[:3]} {repository}".encode())
    for path in (repository / "constraints.txt", *projects(repository)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def projects(repository: Path) -> list[Path]:
    """Return the packages' pyproject.toml files."""
    found = [repository / name / "pyproject.toml" for name in PACKAGES]
    return [path for path in found if path.is_file()]


def requirements(repository: Path) -> list[str]:
    """Return all requirements: those of the constraints and those of the packages."""
    import tomllib

    lines = (line.partition("#")[0].strip() for line in (repository / "constraints.txt").read_text().splitlines())
    wanted = [line for line in lines if line]
    for path in projects(repository):
        wanted += tomllib.loads(path.read_text())["project"].get("dependencies", [])
    return list(dict.fromkeys(wanted))


def _works() -> bool:
    """Return whether the environment is complete and has the version of the running Python."""
    home = settings().venv
    if not (home / "bin" / "python").exists() or not any((home / mark).exists() for mark in (_MADE, _STAMP)):
        return False
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (home / "lib" / f"python{version}" / "site-packages").is_dir()


def _create() -> None:
    say(f"making the Python environment in {settings().venv}")
    shutil.rmtree(settings().venv, ignore_errors=True)
    done = _run([sys.executable, "-m", "venv", str(settings().venv)])
    if done.returncode != 0:
        raise MissingProgramError(f"please install Python's venv module (Debian: python3-venv): {_end(done)}")
    (settings().venv / _MADE).touch()


def _install() -> None:
    constraints = str(settings().repository / "constraints.txt")
    pip = [str(settings().venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    done = _run([*pip, "--constraint", constraints, *requirements(settings().repository)])
    if done.returncode != 0:
        raise CommandFailedError(f"pip could not install the Python packages:\n{_end(done)}")


def _put_sources_on_path() -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    site = settings().venv / "lib" / f"python{version}" / "site-packages"
    sources = [str(settings().repository / name / "src") for name in PACKAGES]
    (site / "holdfast-dev.pth").write_text("\n".join(sources) + "\n")


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=child_environment())


def _end(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip() or done.stdout.strip())[-3000:]


def _read(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
