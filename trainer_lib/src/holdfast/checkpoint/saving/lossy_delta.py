"""Sparse differences: of the weights, only elements that changed by more than a threshold are written. Lossy. No
torch.

Invariant: a restored element differs from the saved one by at most the threshold, for any length of the chain. A
patch has places and new values, never differences. It is computed against the exact bytes that the manifest names for
it. These bytes, the base, are in an earlier checkpoint, and this rank keeps a copy of them in memory. A patch never
builds on the result of another patch, so errors do not add up. A reader applies at most one patch to a row. An
element is always written if it differs and either value is not finite.

If a patch would not be smaller than the changed blocks, the blocks are written, and the piece has a new base.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from holdfast.checkpoint.format.records import FLOATS, MOST_PATCHED, PLACE, PLACES, VALUES, Patch, Records
from holdfast.checkpoint.format.shard_layout import ITEM_BYTES, Piece, TensorSpec, whole
from holdfast.core.errors import UsageError
from holdfast.core.limits import LARGEST_THRESHOLD

if TYPE_CHECKING:
    from numpy.typing import NDArray


_PLACE_BYTES: Final = ITEM_BYTES[PLACE]


def threshold(value: float) -> float:
    """Return the threshold as a float. Raise `UsageError` if it is not valid. 0 means that nothing is lost."""
    if not 0 <= value <= LARGEST_THRESHOLD:
        raise UsageError(
            f"invalid delta threshold {value}: expected the largest difference between a restored and a "
            f"saved weight, at most {LARGEST_THRESHOLD:g}, or 0 for exact checkpoints only"
        )
    return float(value)


Spans = Mapping[int, tuple[int, int]]
"""The begin and end of the changed blocks of a piece, by block number."""
Differ = Callable[[Iterable[tuple[Piece, memoryview]], Mapping[Piece, Spans]], Mapping[Piece, "Difference"]]


def exactly(_: Iterable[tuple[Piece, memoryview]], __: Mapping[Piece, Spans]) -> dict[Piece, Difference]:
    """Write changed blocks only, without patches."""
    return {}


@dataclass(frozen=True, kw_only=True, eq=False)
class Difference:
    """The elements of a piece that are too far from its base: their places in ascending order, and their bits."""

    piece: Piece
    places: NDArray[Any]
    values: NDArray[Any]
    bound: float

    @property
    def nbytes(self) -> int:
        return self.places.nbytes + self.values.nbytes

    @property
    def stacks(self) -> tuple[Piece, Piece]:
        name, shape = self.piece.spec.name, (len(self.places),)
        return (
            whole(TensorSpec(name=name + PLACES, dtype=PLACE, shape=shape)),
            whole(TensorSpec(name=name + VALUES, dtype=self.piece.spec.dtype, shape=shape)),
        )

    def write(self, target: memoryview, begins: Mapping[str, int], file: str) -> Patch:
        """Write the difference into the file's image at these offsets, and return its record."""
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
    """Return the patch for a piece in which only these spans differ from its base; None if it would
    not be smaller.
    """
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
    """Return which elements may be outside the bound.

    Rounding keeps order. The bound is rounded down to a number of the same type, so a distance above the bound is
    never rounded to one below it.
    """
    import numpy as np

    with np.errstate(all="ignore"):
        distance: NDArray[Any] = np.abs(_numbers(new, dtype) - _numbers(old, dtype))
        limit = distance.dtype.type(bound)
        if float(limit) > bound:
            limit = np.nextafter(limit, distance.dtype.type(0))
        far: NDArray[Any] = ~(distance < limit)  # so that NaN counts as far
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
        """Return the differences for the pieces whose patch is smaller than the changed blocks."""
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
        """Keep these pieces as the bases. The pieces in `same` keep their current base."""
        fit = [(piece, data) for piece, data in parts if piece.spec.name in inexact and _may_be_patched(piece)]
        before = {piece: self._held[piece] for piece, _ in fit if piece in self._held}
        self._held = {}  # free the bases of removed pieces before new ones are allocated
        for piece, data in fit:
            base = before.get(piece)
            base = base if base is not None and piece in same else _copied(data, base)
            if base is not None:
                self._held[piece] = base


def _may_be_patched(piece: Piece) -> bool:
    return piece.spec.dtype in FLOATS and piece.shape != () and 0 < math.prod(piece.shape) <= MOST_PATCHED


def _copied(data: memoryview, target: NDArray[Any] | None) -> NDArray[Any] | None:
    """Copy the data, into the old base if there is one.

    Return None without memory: the piece is then written exactly.
    """
    import numpy as np

    try:
        target = np.empty(data.nbytes, np.uint8) if target is None else target
    except MemoryError:
        return None
    np.copyto(target, np.frombuffer(data, np.uint8))
    return target


def patched(records: Records, shards: Iterable[Mapping[str, Patch]]) -> Records:
    """Add the patches that each rank wrote to the records of its tensors."""
    found: dict[str, list[Patch]] = {}
    for name, patch in (item for patches in shards for item in patches.items()):
        found.setdefault(name, []).append(patch)
    if not found:
        return records
    ordered = {name: tuple(sorted(many, key=lambda patch: patch.start)) for name, many in found.items()}
    return Records({**records, **{name: replace(records[name], patches=many) for name, many in ordered.items()}})
