"""Memory in which a rank's file is laid out before it is written: reused, and faulted in beforehand. No torch.

Fresh pages cost ten times what warm ones do, so that the first save would take as long as ten others. `prepare`
fetches them on a thread of its own, while the script goes on. The memory may be somebody else's (`provide`): then
it outlives this process, or is known to a device.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from holdfast.checkpoint.io.direct_writer import aligned, step_back
from holdfast.checkpoint.io.huge_pages import fault_in, fresh

_log = logging.getLogger("holdfast.checkpoint.arena")

# Of at least so many bytes, beginning at a page.
Provide = Callable[[int], memoryview]


def anonymous(nbytes: int) -> memoryview:
    """Private memory, all there. Forked workers of a data loader do not share it: the next save would have to fetch
    other pages."""
    view = fresh(nbytes, inherited=False)
    fault_in(view)
    return view


class Arena:
    """One image at a time. Only its owner asks for it; the thread of `prepare` is the arena's own."""

    def __init__(self, provide: Provide = anonymous) -> None:
        self._provide = provide
        self._memory = memoryview(b"")
        self._preparing: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def prepare(self, nbytes: int) -> None:
        """Have room for so many bytes soon; nothing of an image may be in use. What fails is told by `image`."""
        self._settle()
        if nbytes > self.nbytes:
            self._preparing = threading.Thread(
                target=self._grow_aside, args=(nbytes,), name="holdfast-arena", daemon=True
            )
            self._preparing.start()

    def image(self, nbytes: int) -> memoryview:
        """Room for so many bytes, and for what is missing to whole pages; MemoryError or OSError if there is none."""
        self._settle()
        if nbytes > self.nbytes:
            self._grow(nbytes)
        return self._memory[: aligned(nbytes)]

    def _settle(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def _grow_aside(self, nbytes: int) -> None:
        step_back()
        try:
            self._grow(nbytes)
        except (OSError, MemoryError) as error:
            _log.warning("there is no memory for a checkpoint of %d bytes yet: %s", nbytes, error)

    def _grow(self, nbytes: int) -> None:
        self._memory = memoryview(b"")  # not both at once
        self._memory = self._provide(aligned(nbytes))
