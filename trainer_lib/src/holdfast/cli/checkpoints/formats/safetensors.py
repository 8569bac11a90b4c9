"""Reads safetensors files of unknown origin. Every number in them is validated."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import torch

from holdfast.checkpoint.format.safetensors_header import LENGTH_BYTES, Entry, header_bytes, parse
from holdfast.checkpoint.state.dtypes import torch_dtype
from holdfast.core.errors import CorruptCheckpointError


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of one file. Their bytes are read on first use."""
    size = path.stat().st_size
    with path.open("rb") as file:
        try:
            start = file.read(LENGTH_BYTES)
            start += file.read(header_bytes(start, size) - LENGTH_BYTES)
            table = parse(start, size)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{path}: {error}") from error
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {name: _tensor(data, entry) for name, entry in table.items()}


def _tensor(data: mmap.mmap, entry: Entry) -> torch.Tensor:
    dtype, count = torch_dtype(entry.dtype), math.prod(entry.shape)
    if not count:
        return torch.empty(entry.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype, count=count, offset=entry.offset).reshape(entry.shape)
