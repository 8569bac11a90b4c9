"""The trainer's runtime: the host's interpreter, libraries and virtual environment, read-only in pods.

Each node mounts them below one folder. Its containerd mounts that folder at `/opt/host` in every container. In the
almost empty trainer image, symbolic links map every absolute path of the host to that folder.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from holdfast_testbed.constants import RUNTIME_MOUNT
from holdfast_testbed.settings import settings

_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """A folder of the host and its name below the runtime folder."""

    source: Path
    name: str

    @property
    def in_pod(self) -> str:
        """The path in a pod."""
        return f"{RUNTIME_MOUNT}/{self.name}"


def exposed() -> list[Exposed]:
    """Return the paths of the host that pods need to run its Python."""
    found = [Exposed(source=Path("/usr"), name="usr")]
    found += [
        Exposed(source=Path("/", name), name=name)
        for name in _SYSTEM
        if Path("/", name).is_dir() and not Path("/", name).is_symlink()
    ]
    prefix = Path(sys.base_prefix).resolve()
    if Path("/usr") not in (prefix, *prefix.parents):
        found.append(Exposed(source=prefix, name="python"))
    found.append(Exposed(source=settings().venv, name="venv"))
    return found


def mounts(folder: Path) -> list[tuple[Path, Path]]:
    """Return the mounts below `folder`, whose empty mount points are created."""
    pairs = [(item.source, folder / item.name) for item in exposed()]
    for _, target in pairs:
        target.mkdir(parents=True, exist_ok=True)
    return pairs


def links() -> dict[str, str]:
    """Return the symbolic links of the trainer image: path in the pod → target."""
    made = {str(item.source): item.in_pod for item in exposed()}
    for name in _SYSTEM:
        if Path("/", name).is_symlink():
            made[f"/{name}"] = str(Path("/", name).readlink())
    base = Path(sys.base_prefix)
    if base != base.resolve() and Path("/usr") not in base.parents:
        made[str(base)] = f"{RUNTIME_MOUNT}/python"
    return made
