"""Reading what `torch.save` wrote: tensors and plain values only, by torch's own restricted reader."""

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
from holdfast.core.errors import DamagedError, UnknownFormatError

_BLOCK: Final = 8 << 20
_GLOBAL: Final = re.compile(r"GLOBAL ([\w.]+)")
# Parts that are there several times are counted each time, and a state may name one often.
_FEW_VALUES: Final = 1 << 20


def read_pickled(path: Path) -> Any:
    """What is in the file. What would have to run code is refused by its name."""
    try:
        _check(path)
        with bounded(path.stat().st_size):
            found = _load(path)
    except pickle.UnpicklingError as error:
        named = _GLOBAL.search(str(error))
        if named is None:
            raise DamagedError(f"{path} is not a file of torch.save with weights alone, or is damaged") from error
        raise UnknownFormatError(
            f"{path} holds more than weights ({named[1]}): load it where you trust it and save its state_dict() alone"
        ) from error
    except Exception as error:  # whatever torch's reader makes of what it does not expect
        if isinstance(error, DamagedError) or (isinstance(error, OSError) and error.errno != errno.EINVAL):
            raise  # EINVAL: a place before the beginning of the file
        raise DamagedError(f"{path} is not a file of torch.save, or is damaged: {error!r}") from error
    _check_sizes(path, found)
    return found


def _check(path: Path) -> None:
    """torch does not look at the checksums that it wrote. The format of before 1.6 has none, nor has a file that was
    saved without (`torch.serialization.set_crc32_options`). Nor does it write anything twice or smaller than it is:
    what is there only so would be larger than any file."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as opened:
        parts = opened.infolist()
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise DamagedError(f"{path} holds compressed parts, and torch.save writes none")
        nbytes = sum(part.file_size for part in parts)
        if nbytes > path.stat().st_size:
            raise DamagedError(f"{path} is smaller than its parts")
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
        raise DamagedError(f"{path}: {name} is not what torch.save wrote: its checksum differs") from error


def _check_sizes(path: Path, found: Any) -> None:
    """A tensor whose elements lie over each other (`expand`) may claim any size, and is written in full."""
    held = path.stat().st_size
    for tensor in _tensors(path, found, max(held, _FEW_VALUES)):
        nbytes = tensor.numel() * tensor.element_size()
        if tensor.layout == torch.strided and nbytes > held:
            raise DamagedError(f"{path} has {held} bytes, and a tensor of shape {list(tensor.shape)} in it {nbytes}")


def _tensors(path: Path, found: Any, most: int) -> Iterator[torch.Tensor]:
    """As often as a commit names them: lists of which each holds the next one twice are soon too many to write."""
    waiting, met = [found], 0
    while waiting:
        one, met = waiting.pop(), met + 1
        if met > most:
            raise DamagedError(f"{path} names parts of itself so often that they are more than {most} values")
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
