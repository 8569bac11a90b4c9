"""Holdfast's storage for `torch.distributed.checkpoint`: its planners, with Holdfast's format and verification.

dcp.save(state, storage_writer=StorageWriter("ckpt", step=100))
dcp.load(state, storage_reader=StorageReader("ckpt"))        # the newest checkpoint, or that of `step`
"""

from __future__ import annotations

from holdfast.checkpoint.dcp.reader import StorageReader
from holdfast.checkpoint.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
