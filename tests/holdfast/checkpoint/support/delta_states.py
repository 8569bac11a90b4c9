"""Tensors that change little between saves."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.io.staging_buffer import Arena
from holdfast.checkpoint.ranks.exchange import Exchange, SingleRank
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.saving import incremental, writer
from holdfast.checkpoint.saving.incremental import Chain
from holdfast.checkpoint.saving.planner import Planner
from holdfast.checkpoint.saving.snapshot import SaveResult, Snapshot
from holdfast.checkpoint.saving.stager import stage
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.core.attempt import AttemptId

ONE = AttemptId(1, 1)


BLOCK = incremental.BLOCK_BYTES


# Rows of one block, several rows per block, rows larger than a block, a scalar, and an empty tensor.
SHAPES = {"wide": (40, BLOCK), "narrow": (300, 1000), "huge": (3, 70_000), "scalar": (), "none": (0, 7)}


Tensors = dict[str, bytearray]


def fresh(seed: int = 0, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Tensors:
    random.seed(seed)
    return {name: bytearray(random.randbytes(size(shape))) for name, shape in shapes.items()}


def size(shape: Sequence[int]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def snapshot(
    step: int, tensors: Tensors, attempt_id: AttemptId = ONE, shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> Snapshot:
    def read(piece: Any) -> bytes:
        shape = piece.spec.shape
        row = size(shape[1:])
        begin = (piece.start[0] if piece.start else 0) * row
        return bytes(tensors[piece.spec.name][begin : begin + piece.nbytes])

    return Snapshot(
        name=CheckpointName(step=step, attempt_id=attempt_id),
        specs=[TensorSpec(name=name, dtype="U8", shape=shape) for name, shape in shapes.items()],
        read=read,
        state={"objects": {}, "counters": {}},
        data=None,
        per_rank={},
        numerics={},
    )


def save(root: Path, step: int, tensors: Tensors, chain: Chain, exchange: Exchange | None = None) -> SaveResult:
    mine = exchange or SingleRank()
    staged = stage(snapshot(step, tensors), Arena(), Planner(), rank=mine.rank, size=mine.size)
    return writer.commit(FolderStore(root), staged, mine, chain=chain)


def read(root: Path, step: int | None = None) -> Any:
    return restore(root, SingleRank(), step=step).loaded


def assert_is(root: Path, step: int, tensors: Tensors) -> None:
    loaded = read(root, step)
    assert loaded is not None
    assert loaded.name.step == step
    assert {name: bytes(loaded.tensors[name]) for name in tensors} == {n: bytes(t) for n, t in tensors.items()}


def manifest(root: Path, step: int) -> Any:
    return catalog.read_manifest(root, CheckpointName(step=step, attempt_id=ONE))


def touch(tensors: Tensors, name: str, at: int) -> None:
    tensors[name][at] ^= 1


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def there(root: Path) -> list[int]:
    return sorted(name.step for name in catalog.list_commits(root))
