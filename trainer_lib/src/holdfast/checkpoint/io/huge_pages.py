"""Fresh memory for what is large, in large pages where the system gives them. No torch.

To fetch a gigabyte of pages of 4 KiB takes a processor 0.3 s, of pages of 2 MiB 0.04 s; and a disk fills large pages
twice as fast, since each request is of few pieces. They can come slowly: where free memory is in pieces, and where
the host of a virtual machine has taken it back (decision 0108).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
from collections.abc import Iterable
from typing import Final, Self

PAGE: Final = 4096
_LARGE_PAGE: Final = 2 << 20
# Fetched at a time: what waits for the mapping meanwhile waits no longer than for this.
_STRIDE: Final = 8 << 20
# A processor's time for each byte that small pages take at most; large ones are slow beyond it.
_SLOW: Final = 0.4 / (1 << 30)

_NO_LARGE_PAGES: Final = 15  # madvise(2)
_POPULATE_WRITE: Final = 23  # madvise(2), Linux 5.14; the mmap module does not name it
_libc: Final = ctypes.CDLL(None, use_errno=True)


def address_of(view: memoryview) -> int:
    """Where a writable view's bytes lie; 0 if it has none."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0


def fresh(nbytes: int, *, offset: int = 0, inherited: bool = True) -> memoryview:
    """Private memory of which no page is there yet; its address is to its page as `offset` is to a file's.

    Processes that are forked meanwhile have it too if it is `inherited`.
    """
    pad = offset % PAGE
    mapped = mmap.mmap(-1, _LARGE_PAGE + pad + nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(mapped)
    begin = -address_of(view) % _LARGE_PAGE
    whole = (pad + nbytes) // _LARGE_PAGE * _LARGE_PAGE  # the rest would take a large page for less than one
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE, begin, whole)
    if not inherited and hasattr(mmap, "MADV_DONTFORK"):
        mapped.madvise(mmap.MADV_DONTFORK)
    return view[begin + pad : begin + pad + nbytes]


def fault_in(view: memoryview) -> None:
    """Have every page of writable memory there. On an older system, and where this is not Linux, they come when they
    are touched."""
    if sys.platform != "linux":
        return
    for begin in range(0, view.nbytes, _STRIDE):
        _advise(view[begin : begin + _STRIDE], _POPULATE_WRITE)


def _advise(view: memoryview, advice: int) -> None:
    """Not by Python's madvise, which holds the interpreter meanwhile."""
    within = address_of(view) % PAGE
    _libc.madvise(
        ctypes.c_void_p(address_of(view) - within), ctypes.c_size_t(view.nbytes + within), ctypes.c_int(advice)
    )


class Ahead:
    """A thread that fetches fresh memory before others fill it: a read that finds pages missing holds the disk up."""

    def __init__(self, views: Iterable[memoryview]) -> None:
        self.large = True
        """Whether pages are large ones as yet: small ones are asked for once those come slowly."""
        self._views = views
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._fetch, name="holdfast-ahead", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _fetch(self) -> None:
        for view in self._views:
            for begin in range(0, view.nbytes, _STRIDE):
                if self._over.is_set():
                    return
                self._fetch_some(view[begin : begin + _STRIDE])

    def _fetch_some(self, view: memoryview) -> None:
        if not self.large:
            _advise(view, _NO_LARGE_PAGES)
        began = time.thread_time()
        _advise(view, _POPULATE_WRITE)
        if time.thread_time() - began > _SLOW * max(view.nbytes, _LARGE_PAGE):
            self.large = False
