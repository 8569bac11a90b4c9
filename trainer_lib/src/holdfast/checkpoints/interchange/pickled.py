"""Reading what `torch.save` wrote: tensors and plain values only, by torch's own restricted reader."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any, Final

import torch

from holdfast.errors import DamagedError, UnknownFormatError

_GLOBAL: Final = re.compile(r"GLOBAL ([\w.]+)")


def read_pickled(path: Path) -> Any:
    """What is in the file. What would have to run code is refused by its name."""
    try:
        return _load(path)
    except pickle.UnpicklingError as error:
        named = _GLOBAL.search(str(error))
        if named is None:
            raise DamagedError(f"{path} is not a file of torch.save with weights alone, or is damaged") from error
        raise UnknownFormatError(
            f"{path} holds more than weights ({named[1]}): load it where you trust it and save its state_dict() alone"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise DamagedError(f"{path} is not a file of torch.save, or is damaged: {error}") from error


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)  # the format of torch before 1.6
