"""Programs of the distribution: from PATH if they are there, else Debian's packages unpacked into the cache.

Unpacked, not installed: no service starts, and nothing of the machine changes.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from holdfast_testbed.errors import MissingProgramError, TestbedError
from holdfast_testbed.programs import find
from holdfast_testbed.say import say
from holdfast_testbed.settings import child_environment, settings


@dataclass(frozen=True, kw_only=True)
class Part:
    """A program and the Debian packages that bring it: the program's own first, then libraries it may lack."""

    program: str
    packages: tuple[str, ...]


UNPACKED = (
    Part(program="runc", packages=("runc", "libseccomp2")),
    Part(program="nft", packages=("nftables", "libnftables1", "libnftnl11", "libjansson4", "libmnl0", "libxtables12",
                                  "libgmp10", "libedit2", "libbsd0", "libmd0")),
)  # fmt: skip

NEEDED = {
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setsid": "util-linux",
    "mount": "mount (util-linux)",
    "ldd": "libc-bin",
}
"""Programs that only the distribution can bring, with the package that has them."""


def check_needed() -> None:
    """Every program that must be installed is, or one error names all that are not."""
    missing = sorted({package for name, package in NEEDED.items() if not _on_path(name)})
    if missing:
        raise MissingProgramError(f"please install these packages with your package manager: {', '.join(missing)}")


def unpack_missing() -> None:
    """Bring `runc` and `nft` where neither PATH nor the cache has them."""
    missing = [part for part in UNPACKED if find(part.program) is None]
    if not missing:
        return
    if not (_on_path("apt-get") and _on_path("dpkg")):
        names = ", ".join(part.packages[0] for part in missing)
        raise MissingProgramError(f"please install these packages with your package manager: {names}")
    for part in missing:
        _unpack(part)


def _unpack(part: Part) -> None:
    say(f"unpacking {part.packages[0]} from Debian's packages")
    root = settings().bin / "debian" / f"{part.program}.root"
    building = root.with_suffix(".tmp")
    shutil.rmtree(building, ignore_errors=True)
    downloads = building / "downloads"
    downloads.mkdir(parents=True)
    for archive in _download(part, downloads):
        _run(["dpkg", "-x", str(archive), str(building)])
    shutil.rmtree(downloads)
    shutil.rmtree(root, ignore_errors=True)
    building.rename(root)
    _write_launcher(part, root)


def _download(part: Part, folder: Path) -> list[Path]:
    """Fetch the packages; lists that are missing or too old to name a version are fetched first."""
    available = known(part.packages)
    try:
        if part.packages[0] not in available:
            raise TestbedError(f"{part.packages[0]} is not listed")
        _run(["apt-get", "download", "-qq", *available], cwd=folder)
    except TestbedError:
        say("fetching Debian's package lists")
        _run(["apt-get", "update", "-qq"])
        _run(["apt-get", "download", "-qq", *known(part.packages)], cwd=folder)
    return sorted(folder.glob("*.deb"))


def known(packages: tuple[str, ...]) -> list[str]:
    """Those of the packages that this release of Debian has."""
    argv = ["apt-cache", "show", "--no-all-versions", *packages]
    shown = subprocess.run(argv, capture_output=True, text=True, check=False, env=child_environment()).stdout
    listed = {line.split(": ", 1)[1] for line in shown.splitlines() if line.startswith("Package: ")}
    return [name for name in packages if name in listed]


def _write_launcher(part: Part, root: Path) -> None:
    """A link to the unpacked program, or where the machine lacks a library, a script that adds the unpacked ones."""
    found = [root / folder / part.program for folder in ("usr/sbin", "usr/bin", "sbin", "bin")]
    binary = next((path for path in found if path.is_file()), None)
    if binary is None:
        raise MissingProgramError(
            f"please install the package {part.packages[0]}: the unpacked one has no {part.program}"
        )
    folders = sorted({str(path.parent) for path in root.rglob("*.so*")})
    launcher = settings().bin / "debian" / part.program
    temporary = launcher.with_suffix(".tmp")
    temporary.write_text(f'#!/bin/sh\nexec env LD_LIBRARY_PATH="{":".join(folders)}" "{binary}" "$@"\n')
    temporary.chmod(0o755)
    if _complete(binary):
        temporary.unlink()
        launcher.unlink(missing_ok=True)
        launcher.symlink_to(binary)
    else:
        temporary.rename(launcher)


def _complete(binary: Path) -> bool:
    """Whether the machine itself has all libraries of a program."""
    shown = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False, env=child_environment())
    return shown.returncode == 0 and "not found" not in shown.stdout


def _on_path(name: str) -> bool:
    return shutil.which(name, path=settings().search_path) is not None


def _run(argv: list[str], cwd: Path | None = None) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=cwd, env=child_environment())
    if done.returncode != 0:
        raise TestbedError(f"{' '.join(argv)} failed: {done.stderr.strip()[-2000:]}")
