"""Reading what `torch.save` wrote: tensors and plain values only, by torch's own restricted reader."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from holdfast.checkpoints.progress import Progress, progress
from holdfast.errors import DamagedError, UnknownFormatError

_BLOCK: Final = 8 << 20
_GLOBAL: Final = re.compile(r"GLOBAL ([\w.]+)")


def read_pickled(path: Path) -> Any:
    """What is in the file. What would have to run code is refused by its name."""
    try:
        _check(path)
        found = _load(path)
    except pickle.UnpicklingError as error:
        named = _GLOBAL.search(str(error))
        if named is None:
            raise DamagedError(f"{path} is not a file of torch.save with weights alone, or is damaged") from error
        raise UnknownFormatError(
            f"{path} holds more than weights ({named[1]}): load it where you trust it and save its state_dict() alone"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DamagedError(f"{path} is not a file of torch.save, or is damaged: {error}") from error
    _check_sizes(path, found)
    return found


def _check(path: Path) -> None:
    """torch does not look at the checksums that it wrote. The format of before 1.6 has none, nor has a file that was
    saved without (`torch.serialization.set_crc32_options`)."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as opened:
        members = opened.infolist() if any(member.CRC for member in opened.infolist()) else []
        with progress("read", sum(member.file_size for member in members)) as shown:
            for member in members:
                _read_whole(opened, member, path, shown)


def _read_whole(opened: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path, shown: Progress) -> None:
    try:
        with opened.open(member) as file:
            while block := file.read(_BLOCK):
                shown.add(len(block))
    except zipfile.BadZipFile as error:
        name = member.filename
        raise DamagedError(f"{path}: {name} is not what torch.save wrote: its checksum differs") from error


def _check_sizes(path: Path, found: Any) -> None:
    """A tensor whose elements lie over each other (`expand`) may claim any size, and is written in full."""
    held = path.stat().st_size
    for tensor in _tensors(found):
        nbytes = tensor.numel() * tensor.element_size()
        if tensor.layout == torch.strided and nbytes > held:
            raise DamagedError(f"{path} has {held} bytes, and a tensor of shape {list(tensor.shape)} in it {nbytes}")


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    waiting, seen = [found], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
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
