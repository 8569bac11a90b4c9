"""Plain memory copied by the C library, by several threads where there are processors for them. No torch.

Where a tensor's bytes go in a file is any multiple of its item. torch's own copy to such a place takes a third longer
than to one that is aligned, and than this; and it is one thread's where the script has set torch to one.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from holdfast.checkpoint.io.thread_pool import Pool
from holdfast.core.linux import processors

PROCESSORS: Final = processors()
# More are taken only where the script lets torch have more.
_COPIERS: Final = 2
# The least taken at a time, so that both end together. From there on the C library writes past the cache, where the
# launcher could tell it to (`rank_env.tunables`).
BLOCK_BYTES: Final = 4 << 20
# Less than this is copied before another thread has begun.
_LEAST_SHARED: Final = 4 << 20


class Move(NamedTuple):
    """So many bytes, from one address to another that does not overlap it. Who calls keeps both alive."""

    target: int
    source: int
    nbytes: int


def copiers(threads: int) -> int:
    """How many copy, where torch has so many threads."""
    return min(PROCESSORS, max(_COPIERS, threads))


def move(moves: Sequence[Move], threads: int = _COPIERS) -> None:
    """Do all of them, by so many threads, of which this is one; the interpreter runs others meanwhile."""
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
    """All blocks, each given to one thread: `next` of a counter is one step of the interpreter and needs no lock."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self._blocks = [block for one in moves for block in _cut(one)]
        self._turns = itertools.count()

    def __iter__(self) -> Iterator[Move]:
        return self

    def __next__(self) -> Move:
        turn = next(self._turns)
        if turn >= len(self._blocks):
            raise StopIteration
        return self._blocks[turn]


def _cut(one: Move) -> Iterator[Move]:
    blocks = max(1, one.nbytes // BLOCK_BYTES)
    edges = [one.nbytes * block // blocks for block in range(blocks + 1)]
    for at, end in itertools.pairwise(edges):
        yield Move(one.target + at, one.source + at, end - at)
