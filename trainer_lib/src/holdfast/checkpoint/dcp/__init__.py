"""Checkpoints through `torch.distributed.checkpoint`: `StorageReader` and `StorageWriter`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.checkpoint.dcp.storage import StorageReader, StorageWriter

__all__ = ["StorageReader", "StorageWriter"]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from holdfast.checkpoint.dcp import storage

    return getattr(storage, name)
