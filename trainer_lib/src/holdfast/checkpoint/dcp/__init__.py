"""Checkpoints through `torch.distributed.checkpoint` (DCP), in Holdfast's format and with its verification.

dcp.save(state, storage_writer=StorageWriter("ckpt", step=100))
dcp.load(state, storage_reader=StorageReader("ckpt"))        # the newest checkpoint, or that of `step`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.checkpoint.dcp.reader import StorageReader
    from holdfast.checkpoint.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]


def __getattr__(name: str) -> Any:
    """Import the modules that need torch on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from holdfast.checkpoint.dcp import reader, writer

    return getattr(reader if name == "StorageReader" else writer, name)
