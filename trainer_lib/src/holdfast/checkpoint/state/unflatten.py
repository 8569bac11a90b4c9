"""Convert a JSON tree and named tensors to values: the inverse of `flatten`."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from holdfast.checkpoint.format.mapping_order import MARK
from holdfast.checkpoint.format.records import TensorRecord
from holdfast.checkpoint.format.shard_layout import ITEM_BYTES
from holdfast.checkpoint.state.dtypes import TORCH_DTYPES
from holdfast.core.errors import StateError

Rows = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]


def all_of_it(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a sharded tensor unchanged, which is the complete one."""
    return tensor


def unflatten(tree: Any, tensor: Callable[[str], torch.Tensor], rows: Rows = all_of_it) -> Any:
    """Return the values of one tree: the inverse of `flatten`.

    `rows` converts a result of `tensor` to a sharded tensor.
    """
    if isinstance(tree, list):
        return [unflatten(item, tensor, rows) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        ((mark, value),) = tree.items()
        if mark.startswith(MARK):
            return _unmark(mark, value, tensor, rows)
    return {key: unflatten(item, tensor, rows) for key, item in tree.items()}


def _unmark(mark: str, value: Any, tensor: Callable[[str], torch.Tensor], rows: Rows) -> Any:
    match mark:
        case "$rows":
            return rows(tensor(value[0]), value[1])
        case "$tensor":
            return tensor(value)
        case "$array":
            array = tensor(value)
            return array if array.is_meta else array.numpy()
        case "$tuple":
            return tuple(unflatten(item, tensor, rows) for item in value)
        case "$counter":
            return Counter(unflatten(value, tensor))
        case "$map":
            return {unflatten(key, tensor): unflatten(item, tensor, rows) for key, item in value}
        case "$float":
            return float(value)
        case "$bytes":
            return base64.b64decode(value)
    raise StateError(f"the checkpoint holds a value marked {mark!r}, which this release does not know")


def rows_in(tree: Any) -> Iterator[tuple[str, int]]:
    """Yield the sharded tensors that a tree names, with their numbers of rows."""
    if isinstance(tree, dict) and list(tree) == ["$rows"]:
        name, shape = tree["$rows"]
        yield name, shape[0]
    elif isinstance(tree, (dict, list)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from rows_in(item)


def adopt(record: TensorRecord, data: memoryview) -> torch.Tensor:
    """Return a tensor that takes over the memory: all of it, or as many rows as there are bytes.

    A tensor that was saved in boxes is assembled, and must be complete.
    """
    dtype = TORCH_DTYPES[record.dtype]
    if not record.in_rows and data.nbytes:
        return _of_boxes(record, data, dtype)
    row = ITEM_BYTES[record.dtype] * math.prod(record.shape[1:])
    shape = (data.nbytes // row if row else record.shape[0], *record.shape[1:]) if record.shape else ()
    if not data.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def _of_boxes(record: TensorRecord, data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    whole, at = torch.empty(record.shape, dtype=dtype, device="cpu"), 0
    for chunk in record.chunks:
        box = torch.frombuffer(data[at : at + chunk.nbytes], dtype=torch.uint8).view(dtype).reshape(chunk.shape)
        place = tuple(slice(begin, begin + size) for begin, size in zip(chunk.start, chunk.shape, strict=True))
        whole[place] = box
        at += chunk.nbytes
    return whole
