"""Copy memory with the C library, on several threads if there are enough processors. No torch.

A tensor's offset in a file can be any multiple of its item size. A copy by torch to an unaligned address takes a
third longer than an aligned copy, or than this one. The copy also uses a single thread if the script has set torch to
one.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from holdfast.checkpoint.io.thread_pool import Pool
from holdfast.core.linux import processors

PROCESSORS: Final = processors()
# More threads are used only if the script gives torch more.
_COPIERS: Final = 2
# The smallest block, so that all threads end at about the same time. For blocks of this size or more, the C library
# writes past the cache, if the launcher could set it so (`rank_env.tunables`).
BLOCK_BYTES: Final = 4 << 20
# Smaller copies end before another thread has started.
_LEAST_SHARED: Final = 4 << 20


class Move(NamedTuple):
    """A copy of `nbytes` bytes between two addresses that do not overlap. The caller keeps both alive."""

    target: int
    source: int
    nbytes: int


def copiers(threads: int) -> int:
    """Return the number of threads that copy, if torch has `threads`."""
    return min(PROCESSORS, max(_COPIERS, threads))


def move(moves: Sequence[Move], threads: int = _COPIERS) -> None:
    """Run all copies on `threads` threads, including this one. The interpreter lock is released meanwhile."""
    if threads == 1 or sum(one.nbytes for one in moves) < _LEAST_SHARED:
        _work(iter(moves))
        return
    blocks = _Shared(moves)
    with Pool(threads - 1, "holdfast-copy") as others:
        for _ in range(threads - 1):
            others.submit(_work, blocks)
        _work(blocks)


def _work(moves: Iterator[Move]) -> None:
    for one in moves:
        ctypes.memmove(one.target, one.source, one.nbytes)


class _Shared:
    """An iterator over all blocks that threads share.

    `next` of a counter is atomic in the interpreter, without a lock.
    """

    def __init__(self, moves: Sequence[Move]) -> None:
        self._blocks = [block for one in moves for block in _cut(one)]
        self._indices = itertools.count()

    def __iter__(self) -> Iterator[Move]:
        return self

    def __next__(self) -> Move:
        index = next(self._indices)
        if index >= len(self._blocks):
            raise StopIteration
        return self._blocks[index]


def _cut(one: Move) -> Iterator[Move]:
    blocks = max(1, one.nbytes // BLOCK_BYTES)
    edges = [one.nbytes * block // blocks for block in range(blocks + 1)]
    for at, end in itertools.pairwise(edges):
        yield Move(one.target + at, one.source + at, end - at)
