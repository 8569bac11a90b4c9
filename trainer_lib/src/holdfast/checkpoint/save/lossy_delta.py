"""Sparse differences: of weights only the elements that moved by more than a threshold are written. Lossy. No torch.

Invariant: what a reader restores of an element differs from what was saved by at most the threshold, however many
commits stand on each other. What is written are places and new values, never differences, and they are chosen against
the very bytes that the manifest names beside them: an exact copy from an earlier commit, the base, of which this rank
keeps another in memory. A patch is never made against what a patch left, so that nothing adds up, and a reader
applies at most one to a row. What is not finite, on either side, and not the same is always written.

Where a patch would not be smaller than the blocks that changed, these are written, and the piece has a new base.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.records import (
    FLOATS,
    MOST_PATCHED,
    PLACE,
    PLACES,
    VALUES,
    Patch,
    Records,
    TensorRecord,
)
from holdfast.checkpoint.format.shard_layout import ITEM_BYTES, Piece, TensorSpec, whole
from holdfast.checkpoint.restore.memory_layout import Extent, Rows
from holdfast.core.errors import DamagedError, UsageError
from holdfast.core.limits import LARGEST_THRESHOLD

if TYPE_CHECKING:
    from numpy.typing import NDArray

# numpy is imported where it is needed: the launcher imports this module, and does without.

_PLACE_BYTES: Final = ITEM_BYTES[PLACE]


def threshold(value: float) -> float:
    """As it was given; UsageError if it is none. 0: nothing is lost."""
    if not 0 <= value <= LARGEST_THRESHOLD:
        raise UsageError(
            f"a delta threshold of {value}: give by how much a restored weight may differ from the saved one, "
            f"at most {LARGEST_THRESHOLD:g}, or 0 for exact commits only"
        )
    return float(value)


# Writing

Spans = Mapping[int, tuple[int, int]]
"""By number, where the blocks of a piece that changed begin and end in it."""
Differ = Callable[[Iterable[tuple[Piece, memoryview]], Mapping[Piece, Spans]], Mapping[Piece, "Difference"]]


def exactly(_: Iterable[tuple[Piece, memoryview]], __: Mapping[Piece, Spans]) -> dict[Piece, Difference]:
    """Nothing is left but blocks."""
    return {}


@dataclass(frozen=True, kw_only=True, eq=False)
class Difference:
    """The elements of a piece that are too far from its base: where they are in it, in order, and their bits."""

    piece: Piece
    places: NDArray[Any]
    values: NDArray[Any]
    bound: float

    @property
    def nbytes(self) -> int:
        """What it takes to write it."""
        return self.places.nbytes + self.values.nbytes

    @property
    def stacks(self) -> tuple[Piece, Piece]:
        """As tensors of a file."""
        name, shape = self.piece.spec.name, (len(self.places),)
        return (
            whole(TensorSpec(name=name + PLACES, dtype=PLACE, shape=shape)),
            whole(TensorSpec(name=name + VALUES, dtype=self.piece.spec.dtype, shape=shape)),
        )

    def write(self, target: memoryview, begins: Mapping[str, int], file: str) -> Patch:
        """Put it where the file has room for it, and say where that is."""
        name = self.piece.spec.name
        for begin, data in ((begins[name + PLACES], self.places), (begins[name + VALUES], self.values)):
            target[begin : begin + data.nbytes] = data.view("u1").data
        return Patch(
            file=file,
            places=begins[name + PLACES],
            values=begins[name + VALUES],
            count=len(self.places),
            start=self.piece.start,
            shape=self.piece.shape,
            bound=self.bound,
        )


def difference(
    piece: Piece, data: memoryview, base: memoryview, spans: Iterable[tuple[int, int]], bound: float
) -> Difference | None:
    """What to write of a piece of which only these spans of bytes differ from its base; None if that is no less."""
    import numpy as np

    spans, dtype = list(spans), piece.spec.dtype
    width, most, taken = ITEM_BYTES[dtype], sum(end - begin for begin, end in spans), 0
    places: list[NDArray[Any]] = []
    values: list[NDArray[Any]] = []
    for begin, end in spans:
        new, old = (np.frombuffer(bytes_[begin:end], f"<u{width}") for bytes_ in (data, base))
        far = np.flatnonzero(_far(new, old, dtype, bound))
        far = far[new[far] != old[far]]
        taken += far.size * (_PLACE_BYTES + width)
        if taken >= most:
            return None
        places.append((far + begin // width).astype("<u4"))
        values.append(new[far])
    return Difference(piece=piece, places=np.concatenate(places), values=np.concatenate(values), bound=bound)


def _far(new: NDArray[Any], old: NDArray[Any], dtype: str, bound: float) -> NDArray[Any]:
    """Which elements are not surely within the bound. Rounding keeps order: a distance above the bound, which is
    rounded down to a number of the same kind, is never rounded to one below it."""
    import numpy as np

    with np.errstate(all="ignore"):
        distance: NDArray[Any] = np.abs(_numbers(new, dtype) - _numbers(old, dtype))
        limit = distance.dtype.type(bound)
        if float(limit) > bound:
            limit = np.nextafter(limit, distance.dtype.type(0))
        far: NDArray[Any] = ~(distance < limit)  # so that what is no number is far
    return far


def _numbers(bits: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype == "BF16":
        return (bits.astype("<u4") << 16).view("<f4")
    if dtype == "F16":
        return bits.view("<f2").astype("<f4")
    return bits.view(f"<f{bits.itemsize}")


@dataclass
class Bases:
    """The bases of a rank's weights, in memory."""

    threshold: float
    _held: dict[Piece, NDArray[Any]] = field(default_factory=dict)

    def differences(
        self,
        parts: Iterable[tuple[Piece, memoryview]],
        changed: Mapping[Piece, Spans],
        inexact: Collection[str],
    ) -> dict[Piece, Difference]:
        """Of the pieces of which a patch is smaller than the blocks that changed."""
        found = {}
        for piece, data in parts:
            base, spans = self._held.get(piece), changed[piece].values()
            if base is None or not spans or piece.spec.name not in inexact:
                continue
            one = difference(piece, data, base.data, spans, self.threshold)
            if one is not None:
                found[piece] = one
        return found

    def keep(
        self, parts: Iterable[tuple[Piece, memoryview]], same: Collection[Piece], inexact: Collection[str]
    ) -> None:
        """Remember these as the bases; those in `same` have the one that they had."""
        fit = [(piece, data) for piece, data in parts if piece.spec.name in inexact and _may_be_patched(piece)]
        before = {piece: self._held[piece] for piece, _ in fit if piece in self._held}
        self._held = {}  # what is no piece any more goes before there is room for others
        for piece, data in fit:
            base = before.get(piece)
            base = base if base is not None and piece in same else _copied(data, base)
            if base is not None:
                self._held[piece] = base


def _may_be_patched(piece: Piece) -> bool:
    return piece.spec.dtype in FLOATS and piece.shape != () and 0 < math.prod(piece.shape) <= MOST_PATCHED


def _copied(data: memoryview, target: NDArray[Any] | None) -> NDArray[Any] | None:
    """A copy, over one that was; None if there is no memory, and the piece is written exactly."""
    import numpy as np

    try:
        target = np.empty(data.nbytes, np.uint8) if target is None else target
    except MemoryError:
        return None
    np.copyto(target, np.frombuffer(data, np.uint8))
    return target


def patched(records: Records, shards: Iterable[Mapping[str, Patch]]) -> Records:
    """Where tensors lie, with the patches that each rank wrote of its rows."""
    found: dict[str, list[Patch]] = {}
    for name, patch in (item for patches in shards for item in patches.items()):
        found.setdefault(name, []).append(patch)
    if not found:
        return records
    ordered = {name: tuple(sorted(many, key=lambda patch: patch.start)) for name, many in found.items()}
    return Records({**records, **{name: replace(records[name], patches=many) for name, many in ordered.items()}})


# Reading


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
        if _overlap(patch, rows.get(name))
    ]


def _overlap(patch: Patch, rows: tuple[int, int] | None) -> bool:
    return rows is None or (patch.start[0] < rows[1] and rows[0] < patch.start[0] + patch.shape[0])


def with_room(record: TensorRecord, patch: Patch) -> Wanted:
    """All of it."""
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
