"""Patches of tensors that were saved with a threshold: what to read, and where to apply it. Lossy. No torch.

A reader applies at most one patch to a row, over the exact bytes that the manifest names for it.
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
from holdfast.core.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# numpy is imported on use, because the launcher imports this module and does not need it.


def inexactness(manifest: Manifest) -> str:
    """Describe how exact a checkpoint is; "" if all tensors are exact."""
    bounds = manifest.bounds
    if not bounds:
        return ""
    within = f"within {max(bounds.values()):g} of the saved value"
    if len(bounds) == len(manifest.tensors):
        return f"all tensors are {within}"
    return f"{len(bounds)} of {len(manifest.tensors)} tensors are {within}, the others are exact"


@dataclass(frozen=True, kw_only=True)
class PatchRead:
    """A patch of a tensor, and the buffers for its bytes."""

    record: TensorRecord
    patch: Patch
    places: memoryview
    values: memoryview


def patch_reads(manifest: Manifest, rows: Rows) -> list[tuple[str, PatchRead]]:
    """Return the patches of the requested rows, by tensor, and allocate their buffers.

    The caller has checked that the files are as long as the manifest states.
    """
    return [
        (name, with_buffers(record, patch))
        for name, record in manifest.tensors.items()
        for patch in record.patches
        if name not in rows or (patch.start[0] < rows[name][1] and rows[name][0] < patch.start[0] + patch.shape[0])
    ]


def with_buffers(record: TensorRecord, patch: Patch) -> PatchRead:
    places, values = (memoryview(bytearray(patch.count * ITEM_BYTES[dtype])) for dtype in (PLACE, record.dtype))
    return PatchRead(record=record, patch=patch, places=places, values=values)


def extents(patch_reads: Iterable[PatchRead], others: Mapping[str, Sequence[Extent]]) -> dict[str, list[Extent]]:
    """Return the extents to read of each file, for these patches and for others."""
    found = {file: list(many) for file, many in others.items()}
    for one in patch_reads:
        for offset, buffer in ((one.patch.places, one.places), (one.patch.values, one.values)):
            if buffer.nbytes:
                found.setdefault(one.patch.file, []).append(Extent.over(offset, buffer))
    return {file: sorted(many, key=lambda e: e.offset) for file, many in found.items()}


def apply(one: PatchRead, target: memoryview, first: int) -> None:
    """Apply a patch to a tensor.

    `target` has the elements from `first` on. Raise `CorruptCheckpointError` if it is not valid.
    """
    import numpy as np

    places = checked(one)
    if not len(places) or not target.nbytes:
        return
    elements = np.frombuffer(target, f"<u{ITEM_BYTES[one.record.dtype]}")
    at = places.astype(np.int64) + (one.patch.start[0] * math.prod(one.record.shape[1:]) - first)
    low, high = np.searchsorted(at, (0, elements.size))
    elements[at[low:high]] = np.frombuffer(one.values, elements.dtype)[low:high]


def checked(one: PatchRead) -> NDArray[Any]:
    """Return the patch's places. Raise `CorruptCheckpointError` if they are not ascending, or not in its rows."""
    import numpy as np

    patch = one.patch
    places = np.frombuffer(one.places, "<u4") if one.places.nbytes else np.empty(0, "<u4")
    if len(places) and (np.any(places[1:] <= places[:-1]) or places[-1] >= math.prod(patch.shape)):
        raise CorruptCheckpointError(
            f"{patch.file}: the patch at {patch.places} does not name elements of its rows in order"
        )
    return places


def of_file(manifest: Manifest, file: str) -> Iterator[PatchRead]:
    """Yield the patches in a file, and allocate the buffers of each one on demand."""
    for record in manifest.tensors.values():
        yield from (with_buffers(record, patch) for patch in record.patches if patch.file == file)
