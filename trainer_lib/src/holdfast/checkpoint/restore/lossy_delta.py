"""Patches of tensors that were saved with a threshold: what to read, and where it goes. Lossy. No torch.

A reader applies at most one patch to a row, over the exact bytes that the manifest names beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.records import PLACE, Patch, TensorRecord
from holdfast.checkpoint.format.shard_layout import ITEM_BYTES
from holdfast.checkpoint.restore.memory_layout import Extent, Rows
from holdfast.core.errors import DamagedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# numpy is imported where it is needed: the launcher imports this module, and does without.


def told(manifest: Manifest) -> str:
    """In words, how exact a commit is; empty if it is in all."""
    bounds = manifest.bounds
    if not bounds:
        return ""
    within = f"within {max(bounds.values()):g} of what was saved"
    if len(bounds) == len(manifest.tensors):
        return f"all tensors are {within}"
    return f"{len(bounds)} of {len(manifest.tensors)} tensors are {within}, the others are exact"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A patch of a tensor, and room for its bytes."""

    record: TensorRecord
    patch: Patch
    places: memoryview
    values: memoryview


def wanted(manifest: Manifest, rows: Rows) -> list[tuple[str, Wanted]]:
    """The patches of what is wanted, by tensor. Files are as long as the manifest says: this makes room."""
    return [
        (name, with_room(record, patch))
        for name, record in manifest.tensors.items()
        for patch in record.patches
        if name not in rows or (patch.start[0] < rows[name][1] and rows[name][0] < patch.start[0] + patch.shape[0])
    ]


def with_room(record: TensorRecord, patch: Patch) -> Wanted:
    places, values = (memoryview(bytearray(patch.count * ITEM_BYTES[dtype])) for dtype in (PLACE, record.dtype))
    return Wanted(record=record, patch=patch, places=places, values=values)


def extents(wanted: Iterable[Wanted], others: Mapping[str, Sequence[Extent]]) -> dict[str, list[Extent]]:
    """What to read of which file, for these and for others."""
    found = {file: list(many) for file, many in others.items()}
    for one in wanted:
        for offset, room in ((one.patch.places, one.places), (one.patch.values, one.values)):
            if room.nbytes:
                found.setdefault(one.patch.file, []).append(Extent.over(offset, room))
    return {file: sorted(many, key=lambda e: e.offset) for file, many in found.items()}


def apply(one: Wanted, target: memoryview, first: int) -> None:
    """Put a patch into a tensor, of which `target` has the elements from the `first` on. DamagedError if it says what
    no patch does."""
    import numpy as np

    places = checked(one)
    if not len(places) or not target.nbytes:
        return
    elements = np.frombuffer(target, f"<u{ITEM_BYTES[one.record.dtype]}")
    at = places.astype(np.int64) + (one.patch.start[0] * math.prod(one.record.shape[1:]) - first)
    low, high = np.searchsorted(at, (0, elements.size))
    elements[at[low:high]] = np.frombuffer(one.values, elements.dtype)[low:high]


def checked(one: Wanted) -> NDArray[Any]:
    """Its places; DamagedError if they are not in order, come twice, or are not in its rows."""
    import numpy as np

    patch = one.patch
    places = np.frombuffer(one.places, "<u4") if one.places.nbytes else np.empty(0, "<u4")
    if len(places) and (np.any(places[1:] <= places[:-1]) or places[-1] >= math.prod(patch.shape)):
        raise DamagedError(f"{patch.file}: the patch at {patch.places} names no elements of its rows in order")
    return places


def of_file(manifest: Manifest, file: str) -> Iterator[Wanted]:
    """The patches in a file, room for each as it comes."""
    for record in manifest.tensors.values():
        yield from (with_room(record, patch) for patch in record.patches if patch.file == file)
