"""Detects the format of a file or folder, and reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.cli.checkpoints.formats.safetensors import read_safetensors
from holdfast.cli.checkpoints.formats.torch_save import read_pickled
from holdfast.core.errors import CheckpointError, CorruptCheckpointError, UnknownFormatError

_PICKLED: Final = frozenset({".pt", ".pth", ".bin", ".ckpt"})
_SAFETENSORS: Final = ".safetensors"
_INDEX: Final = ".index.json"
# Files that represent a complete folder, the safest format first.
_IN_FOLDERS: Final = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
_KNOWN: Final = (
    "pass a .safetensors, .pt, .pth, .bin or .ckpt file, an .index.json, or a folder with those or a DCP checkpoint"
)


def read_source(path: Path) -> Any:
    """Return the state dict or other content. Tensors stay in their files if possible."""
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    if path.name.endswith(_INDEX):
        return _read_indexed(path)
    return _read_file(path)


def _read_file(path: Path) -> Any:
    if path.suffix == _SAFETENSORS:
        return read_safetensors(path)
    if path.suffix in _PICKLED:
        return read_pickled(path)
    raise UnknownFormatError(f"{path}: the name does not indicate a known format: {_KNOWN}")


def _read_folder(path: Path) -> Any:
    if (path / ".metadata").exists():
        from holdfast.cli.checkpoints.formats.dcp import read_dcp

        return read_dcp(path)
    for name in _IN_FOLDERS:
        if (path / name).exists():
            return read_source(path / name)
    raise UnknownFormatError(f"{path} holds neither {', '.join(_IN_FOLDERS)} nor .metadata: {_KNOWN}")


def _read_indexed(path: Path) -> dict[str, Any]:
    """Read several files, and an index that maps tensors to files."""
    try:
        table = json.loads(path.read_bytes())["weight_map"]
        files = sorted(set(table.values()))
        good = all(isinstance(file, str) and Path(file).name == file for file in files)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} has no readable weight_map") from error
    if not good:
        raise CorruptCheckpointError(f"{path} names a file outside its folder")
    parts = {file: _read_part(path.parent / file) for file in files}
    missing = sorted(name for name, file in table.items() if name not in parts[file])
    if missing:
        raise CorruptCheckpointError(f"{path} names tensors that its files lack: {', '.join(missing)}")
    return {name: parts[file][name] for name, file in table.items()}


def _read_part(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise CorruptCheckpointError(f"{path} is missing, and the index names it")
    part = _read_file(path)
    if not isinstance(part, Mapping):
        raise UnknownFormatError(f"{path} holds no state dict")
    return part
