"""Publish one checkpoint durably. No torch.

Invariant: a folder with a checkpoint's own name is always complete. The order of writes ensures it:

- Every rank's files are fsynced before the manifest exists.
- The manifest is fsynced before it gets its name.
- The folder gets the checkpoint's name only when the manifest is in it.
- The parent folder is fsynced before the step is reported as saved.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from uuid import uuid4

from holdfast.checkpoint.dcp.metadata import KEY
from holdfast.checkpoint.format.file_names import (
    LATEST,
    MANIFEST,
    CheckpointName,
    rank_file,
    slices_file,
    tensors_file,
)
from holdfast.checkpoint.format.manifest import LARGEST, Manifest, encode
from holdfast.checkpoint.format.mapping_order import parts, text_bytes, too_much
from holdfast.checkpoint.format.records import FileRecord
from holdfast.checkpoint.io.direct_writer import ImageWriter
from holdfast.checkpoint.io.durable_files import create_durably, sync_folder, write_file, write_json
from holdfast.checkpoint.io.shard import Shard
from holdfast.checkpoint.io.slice_digests import LEAST_BYTES, Slicer
from holdfast.core.errors import CheckpointError


def begin(root: Path, name: CheckpointName) -> str:
    """Create a new staging folder, and return its name."""
    staging = f"{name}.tmp-{uuid4().hex}"
    (root / staging).mkdir()
    return staging


def write_shard(folder: Path, shard: Shard) -> dict[str, FileRecord]:
    """Write one rank's files. The small file is durable before most of the image is filled."""
    own, tensors = rank_file(shard.rank), tensors_file(shard.rank)
    slicer = Slicer(shard.plan.nbytes)

    def seen(block: memoryview) -> None:
        slicer.update(block)
        shard.inspect(block)

    files = {
        own: write_json(folder / own, shard.per_rank),
        tensors: ImageWriter(
            path=folder / tensors,
            image=shard.image,
            nbytes=shard.plan.nbytes,
            filling=shard.filling,
            check=shard.check,
            seen=seen,
            pace=shard.pace,
        ).run(),
    }
    if shard.plan.nbytes >= LEAST_BYTES:
        write_file(folder / slices_file(tensors), [slicer.encode(files[tensors])])
    sync_folder(folder)
    return files


def publish(root: Path, staging: str, manifest: Manifest) -> Path:
    """Turn a folder that has every rank's files into a checkpoint."""
    folder, raw, name = root / staging, encoded(manifest), manifest.name
    unnamed = folder / f"{MANIFEST}.tmp"
    create_durably(unnamed, raw)
    unnamed.rename(folder / MANIFEST)
    sync_folder(folder)
    target = root / str(name)
    folder.rename(target)
    sync_folder(root)
    _hint(root, name)
    return target


def encoded(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest. Raise `CheckpointError` if no reader would accept as many."""
    raw = encode(manifest)
    if len(raw) > LARGEST:
        raise CheckpointError(
            f"step {manifest.step} was not saved: {MANIFEST} would have {len(raw)} bytes, more than the "
            f"limit of {LARGEST}. {_too_much(manifest)}"
        )
    return raw


def _too_much(manifest: Manifest) -> str:
    """Name the large part of a manifest, and what to do."""
    trees = [*manifest.state.get(KEY, {}).get("values", {}).items(), *parts(manifest.objects)]
    if sum(text_bytes(tree) for _, tree in trees) > LARGEST // 2:
        return too_much(trees)
    return (
        f"Its table of {len(manifest.tensors)} tensors is large: save full checkpoints more often "
        "(checkpoint.fullEvery), or use fewer and larger tensors"
    )


def _hint(root: Path, name: CheckpointName) -> None:
    """Write `LATEST` for people. No program reads it, so the write may fail and need not be durable."""
    fresh = root / f"{LATEST}.tmp-{uuid4().hex}"
    with contextlib.suppress(OSError):
        try:
            fresh.write_text(f"{name}\n")
            fresh.replace(root / LATEST)
        finally:
            fresh.unlink(missing_ok=True)


def discard(root: Path, staging: str) -> None:
    """Remove the leftovers of a failed save. A later attempt removes what cannot be removed now."""
    shutil.rmtree(root / staging, ignore_errors=True)


def exists(root: Path, name: CheckpointName) -> bool:
    return os.path.lexists(root / str(name) / MANIFEST)
