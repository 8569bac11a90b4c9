"""The memory in which a rank's file is laid out before it is written. It is reused, and faulted in early. No torch.

New pages cost ten times as much as used ones, so the first save would take as long as ten others. `prepare` faults
them in on a separate thread while the script continues. A caller may supply the memory (`provide`): it then outlives
this process, or is registered with a device.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from holdfast.checkpoint.io.direct_writer import aligned, step_back
from holdfast.checkpoint.io.huge_pages import allocate, fault_in

_log = logging.getLogger("holdfast.checkpoint.arena")

# Returns at least this many bytes, which begin at a page.
Provide = Callable[[int], memoryview]


def anonymous(nbytes: int) -> memoryview:
    """Return private memory, with every page faulted in.

    Forked workers of a data loader do not share it: otherwise the next save would have to fault in other pages.
    """
    view = allocate(nbytes, inherited=False)
    fault_in(view)
    return view


class Arena:
    """A buffer for one image at a time. Only its owner requests it; `prepare` uses a thread of the arena."""

    def __init__(self, provide: Provide = anonymous) -> None:
        self._provide = provide
        self._memory = memoryview(b"")
        self._preparing: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def prepare(self, nbytes: int) -> None:
        """Begin to allocate this many bytes. No image may be in use. `image` reports a failure."""
        self._settle()
        if nbytes > self.nbytes:
            self._preparing = threading.Thread(
                target=self._grow_in_background, args=(nbytes,), name="holdfast-arena", daemon=True
            )
            self._preparing.start()

    def image(self, nbytes: int) -> memoryview:
        """Return a buffer of this many bytes, rounded up to complete pages.

        Raise `MemoryError` or `OSError` on failure.
        """
        self._settle()
        if nbytes > self.nbytes:
            self._grow(nbytes)
        return self._memory[: aligned(nbytes)]

    def _settle(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def _grow_in_background(self, nbytes: int) -> None:
        step_back()
        try:
            self._grow(nbytes)
        except (OSError, MemoryError) as error:
            _log.warning("no memory is available yet for a checkpoint of %d bytes: %s", nbytes, error)

    def _grow(self, nbytes: int) -> None:
        self._memory = memoryview(b"")  # release the old memory first
        self._memory = self._provide(aligned(nbytes))
