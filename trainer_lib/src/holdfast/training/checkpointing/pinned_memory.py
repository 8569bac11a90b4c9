"""Host memory for copies from a GPU at the full speed of its link, with all tensors at once."""

from __future__ import annotations

import logging

import torch

from holdfast.checkpoint.io.huge_pages import address_of
from holdfast.checkpoint.io.staging_buffer import anonymous

_log = logging.getLogger("holdfast.checkpoint")


class PinnedMemory:
    """Provides an arena's memory (`staging_buffer.Provide`), one buffer at a time.

    The next buffer releases the last one.
    """

    def __init__(self) -> None:
        self._held: memoryview | None = None

    def __call__(self, nbytes: int) -> memoryview:
        """Return pinned memory, or ordinary memory if pinning fails."""
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if self._held is not None:
            cudart.cudaHostUnregister(address_of(self._held))
            self._held = None
        memory = anonymous(nbytes)
        if int(cudart.cudaHostRegister(address_of(memory), nbytes, 0)):
            _log.warning("%d bytes for checkpoints could not be pinned: copies from the GPU will be slower", nbytes)
        else:
            self._held = memory
        return memory
