"""Folders of checkpoints for the commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

MIB = 1 << 20


FIRST = {"model/a": b"a" * 99, "model/b": b"b" * 7 * MIB, "model/c": b"c" * 2 * MIB, "model/d": b"d" * 5}


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def reseal(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change the manifest of a checkpoint and seal it again."""
    path = folder / "MANIFEST.json"
    document = json.loads(path.read_bytes())
    document.pop("manifestDigest")
    change(document)
    body = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    path.write_bytes(body[:-1] + f',"manifestDigest":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode())


def offset_of(root: Path, name: str, tensor: str) -> int:
    manifest = json.loads((root / name / "MANIFEST.json").read_bytes())
    return int(manifest["tensors"][tensor]["chunks"][0]["offset"])
