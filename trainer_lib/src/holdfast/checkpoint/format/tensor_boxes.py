"""Boxes of a tensor, which are the parts that ranks hold. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The start and the length of a box along each dimension."""


def tiles(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Return whether the boxes form a grid that covers each element of the tensor exactly once."""
    many = list(boxes)
    if any(len(start) != len(shape) or len(size) != len(shape) for start, size in many):
        return False
    cuts = [{(start[dim], start[dim] + size[dim]) for start, size in many} for dim in range(len(shape))]
    if not all(_end_to_end(length, sorted(own)) for length, own in zip(shape, cuts, strict=True)):
        return False
    return len(many) == len({start for start, _ in many}) == math.prod(map(len, cuts))


def _end_to_end(length: int, cuts: Sequence[tuple[int, int]]) -> bool:
    edges = [0, *(end for _, end in cuts)]
    follow = all(begin == edge < end for (begin, end), edge in zip(cuts, edges, strict=False))
    return bool(cuts) and follow and edges[-1] == length


def runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """Yield the elements of a box as contiguous runs in the tensor: the offset of a run, and its length."""
    start, size = box
    inner = len(shape)
    while inner > 1 and size[inner - 1] == shape[inner - 1]:
        inner -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(begin * stride for begin, stride in zip(start, strides, strict=True))
    length = math.prod(size[inner - 1 :])
    steps = zip(size[: inner - 1], strides, strict=False)
    for places in itertools.product(*(range(0, count * stride, stride) for count, stride in steps)):
        yield first + sum(places), length
