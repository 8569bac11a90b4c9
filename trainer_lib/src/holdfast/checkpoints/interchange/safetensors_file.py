"""Reading safetensors files that others wrote, without trusting a number in them."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from holdfast.checkpoint.shard import ITEM_BYTES
from holdfast.checkpoint.state import torch_dtype
from holdfast.errors import DamagedError

_LENGTH_BYTES: Final = 8
# As in the format's own library.
_MOST_HEADER_BYTES: Final = 100_000_000


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one file; they stay in it until they are used."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MOST_HEADER_BYTES):
            raise DamagedError(f"{path}: a header of {length} bytes in a file of {size}")
        table = _header(path, file.read(length))
        begin = _LENGTH_BYTES + length
        _check(path, table, size - begin)
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {name: _tensor(data, begin, entry) for name, entry in table.items()}


def _header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        table = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: its header is not JSON of safetensors: {error}") from error
    if not isinstance(table, dict):
        raise DamagedError(f"{path}: its header is not a JSON object")
    table.pop("__metadata__", None)
    return table


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands there twice")
    return table


def _check(path: Path, table: Mapping[str, Any], nbytes: int) -> None:
    """Every byte of the data belongs to one tensor, and each tensor has as many as its dtype and shape say."""
    position = 0
    for name, (begin, end) in sorted(((n, _offsets(path, n, e)) for n, e in table.items()), key=lambda item: item[1]):
        if begin != position:
            raise DamagedError(f"{path}: tensor {name!r} begins at {begin} instead of {position}")
        position = end
    if position != nbytes:
        raise DamagedError(f"{path}: {nbytes} bytes of data, of which the header names {position}")


def _offsets(path: Path, name: str, entry: Any) -> tuple[int, int]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        counted = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        good = counted and dtype in ITEM_BYTES and end - begin == ITEM_BYTES[dtype] * math.prod(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{path}: the header's entry of {name!r} cannot be read") from error
    if not good:
        raise DamagedError(f"{path}: dtype, shape and offsets of {name!r} do not fit each other, or are not known")
    return begin, end


def _tensor(data: mmap.mmap, start: int, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape = torch_dtype(entry["dtype"]), entry["shape"]
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=start + entry["data_offsets"][0]).reshape(shape)
