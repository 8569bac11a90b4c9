"""Check that the weights in a file are finite, while their bytes are digested. No torch.

Training cannot continue from weights that are not finite, so they are not saved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from holdfast.checkpoint.format.shard_layout import ITEM_BYTES, ShardPlan
from holdfast.core.errors import NonFiniteWeightsError

# The bits of the smallest value that is not finite, by dtype. All larger bit patterns are not finite either. C64 is
# two F32.
_LEAST: Final[Mapping[str, int]] = MappingProxyType(
    {
        "F8_E4M3": 0x7F,
        "F8_E5M2": 0x7C,
        "F16": 0x7C00,
        "BF16": 0x7F80,
        "F32": 0x7F80_0000,
        "F64": 0x7FF0_0000_0000_0000,
        "C64": 0x7F80_0000,
    }
)
_C64: Final = "C64"


class _Range(NamedTuple):
    begin: int
    end: int
    name: str
    dtype: str


class Inspection:
    """Inspects a file that is passed in, in blocks that begin and end at an item."""

    def __init__(self, plan: ShardPlan, weights: Collection[str]) -> None:
        self._ranges = [
            _Range(offset, offset + piece.nbytes, piece.spec.name, piece.spec.dtype)
            for piece, offset in zip(plan.pieces, plan.offsets, strict=True)
            if piece.spec.name in weights and piece.spec.dtype in _LEAST and piece.nbytes
        ]
        self._next = 0
        self._seen = 0

    def update(self, block: memoryview) -> None:
        """Inspect the next block. The `NonFiniteWeightsError` names the first weight in it that is not finite."""
        begin, end = self._seen, self._seen + block.nbytes
        self._seen = end
        while self._next < len(self._ranges) and self._ranges[self._next].begin < end:
            one = self._ranges[self._next]
            if not _is_finite(block[max(one.begin, begin) - begin : min(one.end, end) - begin], one.dtype):
                raise NonFiniteWeightsError(
                    f"{one.name} holds values that are not finite. This checkpoint is not published, and "
                    "earlier ones are kept. Find the cause of these values, and lower the learning rate"
                )
            if one.end > end:
                return
            self._next += 1


def _is_finite(data: memoryview, dtype: str) -> bool:
    """Return whether all numbers are finite.

    As integers, numbers of one sign are ordered by magnitude, so two maxima replace a test of each number.
    """
    import numpy as np  # imported here because the commands import this module and do not need numpy

    size, least = ITEM_BYTES["F32" if dtype == _C64 else dtype], _LEAST[dtype]
    positive, negative = np.frombuffer(data, f"<i{size}"), np.frombuffer(data, f"<u{size}")
    return int(positive.max()) < least and int(negative.max()) < least + (1 << (8 * size - 1))
