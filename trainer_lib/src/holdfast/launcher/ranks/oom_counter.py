"""Reads how many processes of the cgroup the kernel has killed because of memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_SELF = Path("/proc/self/cgroup")


class OomCounter:
    """The kernel's count of processes killed because of memory in this cgroup (v1 or v2), with the last reading."""

    def __init__(self, *, root: Path = _ROOT, membership: Path = _SELF) -> None:
        self._file = next(filter(Path.is_file, _candidates(root, membership)), None)
        self._seen = self._read()

    def grew(self) -> bool:
        """Whether a process of the cgroup was killed because of memory since the last call."""
        now = self._read()
        grown = now > self._seen
        self._seen = now
        return grown

    def _read(self) -> int:
        if self._file is None:
            return 0
        try:
            text = self._file.read_text()
        except OSError:
            return self._seen if hasattr(self, "_seen") else 0
        fields = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
        return int(fields.get("oom_kill", 0))


def _candidates(root: Path, membership: Path) -> Iterator[Path]:
    """Yield the paths, deepest first: this cgroup, then the root of the cgroup namespace, for v2 and v1."""
    for v1, path in _groups(membership):
        inside = path.lstrip("/")
        name, base = ("memory.oom_control", root / "memory") if v1 else ("memory.events", root)
        yield base / inside / name
        yield base / name
        if not v1:
            yield root / "unified" / inside / name


def _groups(membership: Path) -> Iterator[tuple[bool, str]]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            yield controllers != "", path
