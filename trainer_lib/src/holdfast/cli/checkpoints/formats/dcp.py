"""Reads the tensors of a folder of torch.distributed.checkpoint (DCP), without a process group.

Its `.metadata` is a pickle, and unpickling may run code. It is read by an unpickler that creates only DCP's own
records of tensors, so the folder need not be trusted. Torch reads the tensors with `weights_only`. Values that are
not tensors are pickles too, and are skipped.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any, ClassVar, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from holdfast.checkpoint.format.tensor_boxes import tiles
from holdfast.cli.checkpoints.formats.memory_limit import bounded
from holdfast.core.errors import CheckpointError, CorruptCheckpointError, UnknownFormatError

_log = logging.getLogger("holdfast.checkpoints.interchange")
_RECORDS: Final = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
}


class _Unpickler(pickle._Unpickler):
    """The unpickler in Python, which allows a check before attributes are set."""

    dispatch: ClassVar[Any] = dict(pickle._Unpickler.dispatch)

    def load_build(self) -> None:
        """Set attributes of records only, never of a class: that would change it for this process."""
        target = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(target, type) or not dataclasses.is_dataclass(target):
            raise UnknownFormatError(f".metadata changes a {type(target).__name__}, which no record of DCP needs")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if module == "pathlib" and name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
            return PurePath
        raise UnknownFormatError(f".metadata names {module}.{name}, which no record of DCP needs")


class _Reader(FileSystemReader):
    """DCP's reader with metadata that is already read."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def read_dcp(folder: Path) -> dict[Any, Any]:
    """Return the tensors, nested as they were saved."""
    held = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    with bounded(held):
        metadata = _metadata(folder)
        try:
            return _read(folder, metadata)
        except (Exception, CheckpointException) as error:
            raise CorruptCheckpointError(f"{folder} cannot be read completely: {error}") from error


def _read(folder: Path, metadata: Metadata) -> dict[Any, Any]:
    records = metadata.state_dict_metadata
    left_out = sorted(name for name, record in records.items() if not isinstance(record, TensorStorageMetadata))
    if left_out:
        _log.warning("%s: %d values are not tensors and are left out: %s", folder, len(left_out), ", ".join(left_out))
    tensors = {
        name: torch.empty(record.size, dtype=record.properties.dtype, device="cpu")
        for name, record in records.items()
        if isinstance(record, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the missing process group is intended
        load(tensors, storage_reader=_Reader(folder, metadata), no_dist=True)
    return _nested(tensors, metadata.planner_data)


def _metadata(folder: Path) -> Metadata:
    raw = (folder / ".metadata").read_bytes()
    try:
        return _checked(folder, _Unpickler(io.BytesIO(raw)).load())
    except UnknownFormatError as error:
        raise UnknownFormatError(f"{folder}/{error}: it is not read") from error
    except CheckpointError:
        raise
    except Exception as error:  # records with unexpected content raise any exception
        raise CorruptCheckpointError(f"{folder}/.metadata is corrupt: {error!r}") from error


def _checked(folder: Path, metadata: Any) -> Metadata:
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise UnknownFormatError(".metadata is not that of a DCP checkpoint in files")
    for info in metadata.storage_data.values():
        if type(info.relative_path) is not str or PurePath(info.relative_path).name != info.relative_path:
            raise CorruptCheckpointError(
                f"{folder}/.metadata names a file outside its folder: {info.relative_path!r}"
            )
    _check_tensors(folder, metadata)
    metadata.storage_meta = StorageMeta()
    return metadata


def _check_tensors(folder: Path, metadata: Metadata) -> None:
    """Check that the parts of each tensor cover it, and that all of them fit into the files.

    DCP leaves uncovered elements uninitialised, and allocates the size that the metadata claims.
    """
    files = {info.relative_path for info in metadata.storage_data.values()}
    held = sum((folder / file).stat().st_size for file in files if (folder / file).is_file())
    claimed = 0
    for name, record in metadata.state_dict_metadata.items():
        if not isinstance(record, TensorStorageMetadata):
            continue
        boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in record.chunks]
        if 0 not in record.size and not tiles(record.size, [box for box in boxes if 0 not in box[1]]):
            raise CorruptCheckpointError(
                f"{folder}/.metadata: the parts of {name} do not cover its shape {list(record.size)}"
            )
        claimed += math.prod(record.size) * record.properties.dtype.itemsize
    if claimed > held:
        raise CorruptCheckpointError(
            f"{folder}/.metadata describes {claimed} bytes of tensors, but its files have {held}"
        )


def _nested(tensors: dict[str, torch.Tensor], paths: Any) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for name, tensor in tensors.items():
        path: Sequence[Any] = paths[name] if isinstance(paths, dict) and paths.get(name) else (name,)
        branch = tree
        for part in path[:-1]:
            branch = branch.setdefault(part, {})
        branch[path[-1]] = tensor
    return tree
