"""A random order of any number of samples, without a list of them. Pure.

A keyed Feistel network permutes the numbers below a power of four. A result outside the dataset is permuted again
until it is inside (cycle walking), so the result is still a permutation. A lookup takes microseconds and no memory,
so resuming at any position is free.
"""

from __future__ import annotations

from typing import Final

from holdfast.core.hashing import mix_all

_ROUNDS: Final = 6


class Permutation:
    """A permutation of `range(size)`. A call returns the sample at a place."""

    def __init__(self, size: int, *, key: int) -> None:
        if size < 1:
            raise ValueError("a permutation needs at least one sample")
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        self._keys = tuple(mix_all(key, number) for number in range(_ROUNDS))

    def __call__(self, place: int) -> int:
        """Return the sample at a place, after fewer than four passes on average."""
        if not 0 <= place < self.size:
            raise IndexError(f"place {place} is not in a permutation of {self.size}")
        value = self._pass(place)
        while value >= self.size:
            value = self._pass(value)
        return value

    def _pass(self, value: int) -> int:
        left, right = value >> self._half, value & self._mask
        for key in self._keys:
            left, right = right, left ^ (_round(right, key) & self._mask)
        return (left << self._half) | right


def _round(value: int, key: int) -> int:
    value = ((value ^ key) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 29) ^ (value >> 47)
