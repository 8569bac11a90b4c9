"""Check that the files of a manifest cover its tensors. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from holdfast.checkpoint.format.file_names import inherited, is_shard, shard_rank
from holdfast.checkpoint.format.records import (
    CHUNK_BYTES,
    FLOATS,
    MOST_PATCHED,
    PLACE,
    Chunk,
    FileRecord,
    Patch,
    Records,
    TensorRecord,
)
from holdfast.checkpoint.format.shard_layout import ITEM_BYTES
from holdfast.checkpoint.format.tensor_boxes import tiles
from holdfast.core.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from holdfast.checkpoint.format.manifest import Manifest


def check(manifest: Manifest) -> None:
    """Raise `CorruptCheckpointError` unless the manifest's files cover every byte of every tensor exactly once.

    The files are in this folder, or, if the manifest has a parent, in those of earlier checkpoints.
    """
    for name, record in manifest.files.items():
        if not is_shard(name) and not _earlier(manifest, name):
            raise CorruptCheckpointError(f"MANIFEST.json names a file that cannot be part of a checkpoint: {name!r}")
        if is_shard(name) and shard_rank(name) >= manifest.world_size:
            raise CorruptCheckpointError(
                f"MANIFEST.json: {name} belongs to no rank of a world of {manifest.world_size}"
            )
        if len(record.chunks) != -(-record.nbytes // CHUNK_BYTES):
            raise CorruptCheckpointError(
                f"MANIFEST.json: {name} has {record.nbytes} bytes and {len(record.chunks)} digests"
            )
    _check_tensors(manifest.tensors, manifest.files)


def _check_tensors(tensors: Mapping[str, TensorRecord], files: Mapping[str, FileRecord]) -> None:
    sizes = {name: record.nbytes for name, record in files.items() if name.endswith(".safetensors")}
    known = tensors if isinstance(tensors, Records) else Records()
    if known.fit == sizes:
        return
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, files)
    _check_apart(tensors.values())
    known.fit = sizes


def _earlier(manifest: Manifest, file: str) -> bool:
    """Return whether a file of tensors may be in the folder of an earlier checkpoint."""
    home = inherited(file)
    before = home is not None and home.step < manifest.step and file.endswith(".safetensors")
    return before and manifest.parent is not None


def _check_apart(tensors: Iterable[TensorRecord]) -> None:
    """Check that no byte belongs to two tensors: a small file must not be able to fill the memory."""
    spans = (span for tensor in tensors for span in tensor.spans if span[2])
    ends: dict[str, int] = {}
    for file, offset, nbytes in sorted(spans):
        if offset < ends.get(file, 0):
            raise CorruptCheckpointError(f"MANIFEST.json: two tensors share bytes of {file}")
        ends[file] = offset + nbytes


def _check_tensor(name: str, tensor: TensorRecord, files: Mapping[str, FileRecord]) -> None:
    if tensor.dtype not in ITEM_BYTES:
        raise CorruptCheckpointError(f"MANIFEST.json: tensor {name} has an unknown dtype {tensor.dtype!r}")
    if not (all(_fits(tensor.dtype, chunk, files) for chunk in tensor.chunks) and _is_covered(tensor)):
        raise CorruptCheckpointError(f"MANIFEST.json: the chunks of tensor {name} do not cover it exactly")
    _check_patches(name, tensor, files)


def _fits(dtype: str, chunk: Chunk, files: Mapping[str, FileRecord]) -> bool:
    """Return whether a chunk is within its file, and has as many bytes as its shape and dtype need."""
    within = chunk.file in files and 0 <= chunk.offset <= chunk.offset + chunk.nbytes <= files[chunk.file].nbytes
    return within and ITEM_BYTES[dtype] * math.prod(chunk.shape) == chunk.nbytes


def _is_covered(tensor: TensorRecord) -> bool:
    if not tensor.in_rows:
        return not tensor.patches and tiles(tensor.shape, ((chunk.start, chunk.shape) for chunk in tensor.chunks))
    rows = 0
    for chunk in sorted(tensor.chunks, key=lambda chunk: chunk.start):
        if len(chunk.shape) != len(tensor.shape) or chunk.start != (
            (rows, *(0 for _ in tensor.shape[1:])) if tensor.shape else ()
        ):
            return False
        rows += chunk.shape[0] if chunk.shape else 1
    return rows == (tensor.shape[0] if tensor.shape else 1)


def _check_patches(name: str, tensor: TensorRecord, files: Mapping[str, FileRecord]) -> None:
    """Check that patches cover distinct rows and are in the checkpoint's own files.

    A checkpoint may use the chunks of earlier checkpoints, but never their patches.
    """
    row, free = math.prod(tensor.shape[1:]), 0
    for patch in sorted(tensor.patches, key=lambda patch: patch.start):
        if tensor.dtype not in FLOATS or not _is_rows(patch, tensor) or patch.start[0] < free:
            raise CorruptCheckpointError(f"MANIFEST.json: a patch of tensor {name} is outside its rows")
        free = patch.start[0] + patch.shape[0]
        if not patch.count <= patch.shape[0] * row <= MOST_PATCHED:
            raise CorruptCheckpointError(f"MANIFEST.json: a patch of tensor {name} has {patch.count} elements")
        ends = patch.places + patch.count * ITEM_BYTES[PLACE], patch.values + patch.count * ITEM_BYTES[tensor.dtype]
        here = is_shard(patch.file) and patch.file.endswith(".safetensors") and patch.file in files
        if not here or max(ends) > files[patch.file].nbytes:
            raise CorruptCheckpointError(f"MANIFEST.json: a patch of tensor {name} is in no file of the checkpoint")


def _is_rows(patch: Patch, tensor: TensorRecord) -> bool:
    if not len(patch.start) == len(patch.shape) == len(tensor.shape) > 0:
        return False
    whole = patch.shape[1:] == tensor.shape[1:] and not any(patch.start[1:])
    return whole and patch.start[0] + patch.shape[0] <= tensor.shape[0]
