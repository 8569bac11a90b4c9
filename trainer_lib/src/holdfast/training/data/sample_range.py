"""Samples that a job skips, as ranges of places in its endless order of samples. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.json_fields import JsonFields


@dataclass(frozen=True, kw_only=True, order=True)
class SampleRange(JsonFields):
    """The places [begin, end) in the endless order of samples."""

    begin: int
    end: int


def place_of(number: int, skipped: Sequence[SampleRange]) -> int:
    """Return the place of the sample with this number, counted without the skipped ones.

    The ranges are in order and do not overlap.
    """
    place = number
    for one in skipped:
        if place < one.begin:
            break
        place += one.end - one.begin
    return place


def ranges_of(begin: int, end: int, skipped: Sequence[SampleRange]) -> tuple[SampleRange, ...]:
    """Return the places of the samples with the numbers [begin, end)."""
    found: list[SampleRange] = []
    shift = 0
    for one in skipped:
        edge = min(end, one.begin - shift)  # the number of the first sample after this range
        if begin < edge:
            found.append(SampleRange(begin=begin + shift, end=edge + shift))
            begin = edge
        shift += one.end - one.begin
    return (*found, SampleRange(begin=begin + shift, end=end + shift)) if begin < end else tuple(found)
