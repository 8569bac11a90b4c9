"""What a checkpoint records for `torch.distributed.checkpoint` (DCP), checked against the tensors that it has. Pure.

DCP does not change memory that no box fills. A missing or moved box would therefore leave wrong numbers without an
error. The boxes that a tensor may have are described in `dcp`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.records import TensorRecord, whole_numbers
from holdfast.checkpoint.format.shard_layout import ITEM_BYTES
from holdfast.core.errors import CorruptCheckpointError

KEY: Final = "dcp"


def boxed(name: str, offsets: Sequence[int]) -> str:
    """Return the name of a box that is stored as a tensor of its own."""
    return f"{name}@{','.join(map(str, offsets))}"


def check_described(manifest: Manifest) -> None:
    """Raise `CorruptCheckpointError` unless the record describes each tensor and box of the manifest."""
    stored = manifest.state.get(KEY)
    if stored is None:
        return
    try:
        used = {name for fqn, one in stored["tensors"].items() for name in _used(fqn, one, manifest.tensors)}
        paths = all(isinstance(path, list) for path in stored["planner"].values())
        if not paths or not isinstance(stored["values"], dict):
            raise TypeError("expected a list for each path, and a mapping of values")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(f"MANIFEST.json: its state for DCP cannot be read: {error!r}") from error
    if unsaid := sorted(manifest.tensors.keys() - used):
        raise CorruptCheckpointError(
            f"MANIFEST.json: its state for DCP does not describe the tensor {unsaid[0][:80]!r}"
        )


def _used(fqn: str, stored: Mapping[str, Any], tensors: Mapping[str, TensorRecord]) -> Iterator[str]:
    """Yield the checkpoint's tensors that make up this one."""
    size = whole_numbers(stored["size"])
    boxes = [(whole_numbers(box["offsets"]), whole_numbers(box["sizes"]), box["tensor"]) for box in stored["boxes"]]
    whole = fqn in tensors and all(name == fqn for *_, name in boxes)
    if whole:
        here = [(start, shape) for start, shape, _ in boxes if 0 not in shape]
        there = [(chunk.start, chunk.shape) for chunk in tensors[fqn].chunks if 0 not in chunk.shape]
        good = tensors[fqn].shape == size and sorted(here) == sorted(there)
    else:
        good = all(
            name == boxed(fqn, start) and tensors[name].shape == shape and _within(size, start, shape)
            for start, shape, name in boxes
        )
    names = {fqn} if whole else {name for *_, name in boxes}
    known = isinstance(stored["dtype"], str) and stored["dtype"] in ITEM_BYTES
    filled = bool(boxes) or whole or 0 in size
    if not (good and known and filled) or any(tensors[name].dtype != stored["dtype"] for name in names):
        raise CorruptCheckpointError(f"MANIFEST.json: its state for DCP and its tensors disagree about {fqn[:80]!r}")
    yield from names


def _within(size: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> bool:
    ends = zip(size, start, shape, strict=True)
    return all(begin + length <= most for most, begin, length in ends)
