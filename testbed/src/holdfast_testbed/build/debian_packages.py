"""Programs of the distribution: from PATH, or else from Debian packages that are unpacked into the cache.

They are unpacked and not installed: no service starts, and the machine stays unchanged. `apt-get download` accepts an
archive only if its digest is in the distribution's signed lists.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast_testbed.build.programs import find
from holdfast_testbed.errors import MissingProgramError, TestbedError
from holdfast_testbed.progress_output import say
from holdfast_testbed.settings import child_environment, settings


@dataclass(frozen=True, kw_only=True)
class Part:
    """Programs, and the Debian packages that contain them: first their own, then libraries that may be missing."""

    programs: tuple[str, ...]
    packages: tuple[str, ...]

    @property
    def missing(self) -> bool:
        """Whether one of the programs is missing."""
        return any(find(program) is None for program in self.programs)


UNPACKED = (
    Part(programs=("runc",), packages=("runc", "libseccomp2")),
    Part(programs=("nft",), packages=("nftables", "libnftables1", "libnftnl11", "libjansson4", "libmnl0",
                                      "libxtables12", "libgmp10", "libedit2", "libbsd0", "libmd0")),
)  # fmt: skip

FOR_TESTS = {
    "monitoring": (
        Part(programs=("prometheus", "promtool"), packages=("prometheus",)),
        Part(programs=("prometheus-alertmanager", "amtool"), packages=("prometheus-alertmanager",)),
    ),
    "strace": (Part(programs=("strace",), packages=("strace", "libunwind8", "liblzma5")),),
}
"""Programs that only some tests need, by the option that installs them: Prometheus and Alertmanager, and strace."""

NEEDED = {
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setsid": "util-linux",
    "mount": "mount (util-linux)",
    "ldd": "libc-bin",
}
"""Programs that only the distribution provides, with their packages."""


def check_needed() -> None:
    """Raise one error that names all programs that must be installed."""
    missing = {package for name, package in NEEDED.items() if not _on_path(name)}
    if not _debian():
        missing |= {part.packages[0] for part in UNPACKED if part.missing}
    if missing:
        names = ", ".join(sorted(missing))
        raise MissingProgramError(f"please install these packages with your package manager: {names}")


def unpack_missing() -> None:
    """Unpack `runc` and `nft` if neither PATH nor the cache has them."""
    check_needed()
    for part in UNPACKED:
        if part.missing:
            _unpack(part)


def unpack_for_tests(options: Collection[str]) -> None:
    """Unpack the programs that only tests need. Without them, demo and cluster work on other systems than Debian."""
    missing = [part for option, parts in FOR_TESTS.items() if option in options for part in parts if part.missing]
    if missing and not _debian():
        names = ", ".join(part.packages[0] for part in missing)
        say(f"some tests need these packages, which are not installed: {names}")
        return
    for part in missing:
        _unpack(part)


def _debian() -> bool:
    return _on_path("apt-get") and _on_path("dpkg")


def _unpack(part: Part) -> None:
    say(f"unpacking {part.packages[0]} from Debian's packages")
    root = settings().bin / "debian" / f"{part.programs[0]}.root"
    building = root.with_suffix(".tmp")
    shutil.rmtree(building, ignore_errors=True)
    downloads = building / "downloads"
    downloads.mkdir(parents=True)
    for archive in _download(part, downloads):
        _run(["dpkg", "-x", str(archive), str(building)])
    shutil.rmtree(downloads)
    shutil.rmtree(root, ignore_errors=True)
    building.rename(root)
    for name in part.programs:
        _write_launcher(part, root, name)


def _download(part: Part, folder: Path) -> list[Path]:
    """Download the packages. Missing or outdated package lists are updated first."""
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
    """Return the packages that this release of Debian has."""
    argv = ["apt-cache", "show", "--no-all-versions", *packages]
    shown = subprocess.run(argv, capture_output=True, text=True, check=False, env=child_environment()).stdout
    listed = {line.split(": ", 1)[1] for line in shown.splitlines() if line.startswith("Package: ")}
    return [name for name in packages if name in listed]


def _write_launcher(part: Part, root: Path, program: str) -> None:
    """Create a link to the unpacked program, or a script that adds unpacked libraries that the machine lacks."""
    found = [root / folder / program for folder in ("usr/sbin", "usr/bin", "sbin", "bin")]
    binary = next((path for path in found if path.is_file()), None)
    if binary is None:
        raise MissingProgramError(f"please install the package {part.packages[0]}: the unpacked one has no {program}")
    launcher = settings().bin / "debian" / program
    launcher.unlink(missing_ok=True)
    if _complete(binary):
        launcher.symlink_to(binary.relative_to(launcher.parent))
        return
    write_script(launcher, binary, sorted({path.parent for path in root.rglob("*.so*")}))


def write_script(launcher: Path, binary: Path, libraries: Sequence[Path]) -> None:
    """Write a script that finds the program and its libraries next to itself, so that the cache can be moved."""
    folder = launcher.parent
    path = ":".join(f"$here/{one.relative_to(folder)}" for one in libraries)
    temporary = launcher.with_suffix(".tmp")
    temporary.write_text(
        '#!/bin/sh\nhere=$(dirname "$(readlink -f "$0")")\n'
        f'exec env LD_LIBRARY_PATH="{path}" "$here/{binary.relative_to(folder)}" "$@"\n'
    )
    temporary.chmod(0o755)
    temporary.rename(launcher)


def _complete(binary: Path) -> bool:
    """Return whether the machine itself has all libraries of a program."""
    shown = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False, env=child_environment())
    return shown.returncode == 0 and "not found" not in shown.stdout


def _on_path(name: str) -> bool:
    return shutil.which(name, path=settings().search_path) is not None


def _run(argv: list[str], cwd: Path | None = None) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=cwd, env=child_environment())
    if done.returncode != 0:
        raise TestbedError(f"{' '.join(argv)} failed: {done.stderr.strip()[-2000:]}")
