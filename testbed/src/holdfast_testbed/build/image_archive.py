"""Writes container images: layers as tar files, and the archive that `docker load` and `ctr import` read."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


class Layer:
    """A layer that is being written. Root owns everything and all times are zero, so equal content is equal bytes."""

    def __init__(self, path: Path) -> None:
        self._tar = tarfile.open(path, "w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        self._known: set[str] = set()

    def __enter__(self) -> Layer:
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def holds(self, path: str) -> bool:
        """Return whether the layer has this path."""
        return path.strip("/") in self._known

    def folder(self, path: str, mode: int = 0o755) -> None:
        """Add a folder, with all its parents."""
        name = path.strip("/")
        if not name or name in self._known:
            return
        self.folder(str(Path("/", name).parent))
        self._add(name, tarfile.DIRTYPE, mode=mode)

    def link(self, path: str, target: str) -> None:
        self.folder(str(Path("/", path.strip("/")).parent))
        self._add(path.strip("/"), tarfile.SYMTYPE, target=target)

    def data(self, path: str, content: bytes, mode: int = 0o644) -> None:
        self.folder(str(Path("/", path.strip("/")).parent))
        self._add(path.strip("/"), tarfile.REGTYPE, mode=mode, content=content)

    def copy(self, source: Path, path: str) -> None:
        """Add a file of the host. It is executable for all users if it is for its owner."""
        self.data(path, source.read_bytes(), 0o755 if source.stat().st_mode & 0o100 else 0o644)

    def _add(self, name: str, kind: bytes, *, mode: int = 0o777, content: bytes = b"", target: str = "") -> None:
        if name in self._known:
            return
        self._known.add(name)
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode, entry.size, entry.linkname = kind, mode, len(content), target
        self._tar.addfile(entry, io.BytesIO(content))


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """The start command and environment of an image."""

    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    working_folder: str = "/"


def write_archive(path: Path, *, reference: str, layers: Sequence[Path], settings: ImageSettings) -> None:
    """Write an image archive of these layers. The file at `path` is complete or absent."""
    digests = [_digest(layer) for layer in layers]
    config = json.dumps(_config(digests, settings), sort_keys=True).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    names = [f"{digest}/layer.tar" for digest in digests]
    manifest = [{"Config": config_name, "RepoTags": [reference], "Layers": names}]
    temporary = path.with_name(f".{path.name}.tmp")
    with tarfile.open(temporary, "w") as out:
        for layer, name in zip(layers, names, strict=True):
            out.add(layer, name, filter=_anonymous)
        for name, content in ((config_name, config), ("manifest.json", json.dumps(manifest).encode())):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            out.addfile(entry, io.BytesIO(content))
    temporary.rename(path)


def _config(digests: Sequence[str], settings: ImageSettings) -> dict[str, Any]:
    machine = platform.machine()
    return {
        "architecture": _MACHINES.get(machine, machine),
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": {
            "Env": [f"{name}={value}" for name, value in settings.environment.items()],
            "Entrypoint": list(settings.entrypoint) or None,
            "Cmd": list(settings.command) or None,
            "User": settings.user,
            "WorkingDir": settings.working_folder,
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
    }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry
