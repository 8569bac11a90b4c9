"""Reads files of `torch.save`: only tensors and plain values, with torch's restricted unpickler."""

from __future__ import annotations

import errno
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from holdfast.cli.checkpoints.access.progress_bar import Progress, progress
from holdfast.cli.checkpoints.formats.memory_limit import bounded
from holdfast.core.errors import CorruptCheckpointError, UnknownFormatError

_BLOCK: Final = 8 << 20
_GLOBAL: Final = re.compile(r"GLOBAL ([\w.]+)")
# A file may always have this many values. Each reference to the same part counts.
_FEW_VALUES: Final = 1 << 20


def read_pickled(path: Path) -> Any:
    """Return the content of the file. Content that requires code is rejected by name."""
    try:
        _check(path)
        with bounded(path.stat().st_size):
            found = _load(path)
    except pickle.UnpicklingError as error:
        named = _GLOBAL.search(str(error))
        if named is None:
            raise CorruptCheckpointError(
                f"{path} is not a file of torch.save with weights only, or is corrupt"
            ) from error
        raise UnknownFormatError(
            f"{path} holds more than weights ({named[1]}): load it in a trusted environment, and save only "
            "its state_dict()"
        ) from error
    except Exception as error:  # torch's reader raises any exception on unexpected content
        if isinstance(error, CorruptCheckpointError) or (isinstance(error, OSError) and error.errno != errno.EINVAL):
            raise  # EINVAL: a position before the beginning of the file
        raise CorruptCheckpointError(f"{path} is not a file of torch.save, or is corrupt: {error!r}") from error
    _check_sizes(path, found)
    return found


def _check(path: Path) -> None:
    """Verify the checksums, which torch itself does not do.

    Files of torch before 1.6, and those saved without checksums (`torch.serialization.set_crc32_options`), have none.
    `torch.save` neither compresses nor overlaps parts, so the parts must fit into the file.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as opened:
        parts = opened.infolist()
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise CorruptCheckpointError(f"{path} holds compressed parts, which torch.save never writes")
        nbytes = sum(part.file_size for part in parts)
        if nbytes > path.stat().st_size:
            raise CorruptCheckpointError(f"{path} is smaller than its parts")
        with progress("read", nbytes) as shown:
            for part in parts if any(part.CRC for part in parts) else []:
                _read_whole(opened, part, path, shown)


def _read_whole(opened: zipfile.ZipFile, part: zipfile.ZipInfo, path: Path, shown: Progress) -> None:
    try:
        with opened.open(part) as file:
            while block := file.read(_BLOCK):
                shown.add(len(block))
    except zipfile.BadZipFile as error:
        name = part.filename
        raise CorruptCheckpointError(
            f"{path}: {name} was changed after torch.save wrote it: its checksum does not match"
        ) from error


def _check_sizes(path: Path, found: Any) -> None:
    """Reject a tensor that is larger than its file: overlapping elements (`expand`) permit any size."""
    held = path.stat().st_size
    for tensor in _tensors(path, found, max(held, _FEW_VALUES)):
        nbytes = tensor.numel() * tensor.element_size()
        if tensor.layout == torch.strided and nbytes > held:
            raise CorruptCheckpointError(
                f"{path} has {held} bytes, but a tensor of shape {list(tensor.shape)} in it has {nbytes}"
            )


def _tensors(path: Path, found: Any, most: int) -> Iterator[torch.Tensor]:
    """Yield each tensor once per reference, up to a limit: repeated references in lists grow exponentially."""
    waiting, met = [found], 0
    while waiting:
        one, met = waiting.pop(), met + 1
        if met > most:
            raise CorruptCheckpointError(
                f"{path} refers to its own parts so often that they are more than {most} values"
            )
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, (list, tuple)):
            waiting += one


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)  # the format of torch before 1.6
