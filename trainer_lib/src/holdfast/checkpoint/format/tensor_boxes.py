"""Boxes of a tensor, as those who hold parts of it have them. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins, and how long it is, along each dimension."""


def tiles(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Whether they make a tensor up, each element once: every combination of the cuts along each dimension."""
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
    """The elements of a box in its own order, as runs of neighbours in the tensor: where one begins, its length."""
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
