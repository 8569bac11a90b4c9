"""A 64-bit mixer (the finalizer of SplitMix64). Pure."""

from __future__ import annotations

from typing import Final

MASK64: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """Mix 64 bits: every input bit changes every output bit with probability one half."""
    value = (value + _STEP) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def mix_all(*values: int) -> int:
    """Mix several numbers into one, in order."""
    result = 0
    for value in values:
        result = mix(result ^ (value & MASK64))
    return result
