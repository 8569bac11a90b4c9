"""New memory for large buffers, in large pages where the system provides them. No torch.

Faulting in a gigabyte takes 0.3 s of CPU time with pages of 4 KiB, and 0.04 s with pages of 2 MiB. A disk also fills
large pages twice as fast, because each request has few pieces. Large pages can be slow: if free memory is fragmented,
or if the host of a virtual machine has reclaimed it (decision 0108).
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
# The bytes that are faulted in per call. Another thread waits for the mapping no longer than for one call.
_STRIDE: Final = 8 << 20
# The longest CPU time per byte for small pages. Large pages that take longer are slow.
_SLOW: Final = 0.4 / (1 << 30)

_NO_LARGE_PAGES: Final = 15  # madvise(2)
_POPULATE_WRITE: Final = 23  # madvise(2), Linux 5.14; the mmap module does not name it
_libc: Final = ctypes.CDLL(None, use_errno=True)


def address_of(view: memoryview) -> int:
    """Return the address of a writable view; 0 if the view is empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0


def allocate(nbytes: int, *, offset: int = 0, inherited: bool = True) -> memoryview:
    """Return private memory without any page faulted in. Its address within a page is `offset` modulo the page size.

    Child processes that are forked share the memory if it is `inherited`.
    """
    pad = offset % PAGE
    mapped = mmap.mmap(-1, _LARGE_PAGE + pad + nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(mapped)
    begin = -address_of(view) % _LARGE_PAGE
    # without the rest, which would use a large page for less than one
    whole = (pad + nbytes) // _LARGE_PAGE * _LARGE_PAGE
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE, begin, whole)
    if not inherited and hasattr(mmap, "MADV_DONTFORK"):
        mapped.madvise(mmap.MADV_DONTFORK)
    return view[begin + pad : begin + pad + nbytes]


def fault_in(view: memoryview) -> None:
    """Fault in every page of writable memory. Older systems, and systems other than Linux, do so on first access."""
    if sys.platform != "linux":
        return
    for begin in range(0, view.nbytes, _STRIDE):
        _advise(view[begin : begin + _STRIDE], _POPULATE_WRITE)


def _advise(view: memoryview, advice: int) -> None:
    """Call madvise without Python's wrapper, which holds the interpreter lock during the call."""
    within = address_of(view) % PAGE
    _libc.madvise(
        ctypes.c_void_p(address_of(view) - within), ctypes.c_size_t(view.nbytes + within), ctypes.c_int(advice)
    )


class Ahead:
    """A thread that faults in new memory before others fill it. Missing pages would delay the reads of the disk."""

    def __init__(self, views: Iterable[memoryview]) -> None:
        self.large = True
        """Whether pages are still large. The thread switches to small pages when large ones are slow."""
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
