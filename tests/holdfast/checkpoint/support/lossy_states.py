"""States that are saved with a threshold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.io.staging_buffer import Arena
from holdfast.checkpoint.ranks.exchange import Exchange, SingleRank
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.saving import writer
from holdfast.checkpoint.saving.incremental import Chain
from holdfast.checkpoint.saving.planner import Planner
from holdfast.checkpoint.saving.snapshot import SaveResult, Snapshot
from holdfast.checkpoint.saving.stager import stage
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.core.attempt import AttemptId

ONE = AttemptId(1, 1)


State = dict[str, np.ndarray[Any, Any]]


# numpy has no bfloat16 and no 8-bit floats: their bits are kept.
KINDS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "I64": "<i8", "BOOL": "?"}


WEIGHT: dict[str, tuple[str, tuple[int, ...]]] = {"weight": ("F32", (300, 512)), "moment": ("F32", (20, 10))}


Forms = Mapping[str, tuple[str, tuple[int, ...]]]


def snapshot(step: int, state: State, forms: Forms, inexact: frozenset[str], attempt_id: AttemptId = ONE) -> Snapshot:
    def read(piece: Any) -> bytes:
        whole = state[piece.spec.name]
        return (whole[piece.start[0] : piece.start[0] + piece.shape[0]] if piece.shape else whole).tobytes()

    return Snapshot(
        name=CheckpointName(step=step, attempt_id=attempt_id),
        specs=[TensorSpec(name=name, dtype=dtype, shape=shape) for name, (dtype, shape) in forms.items()],
        read=read,
        state={"objects": {"model": {"w": {"$tensor": "weight"}}} if "weight" in forms else {}, "counters": {}},
        data=None,
        per_rank={},
        numerics={},
        inexact=inexact,
    )


def save(
    root: Path,
    step: int,
    state: State,
    chain: Chain,
    *,
    exchange: Exchange | None = None,
    forms: Forms = WEIGHT,
    inexact: frozenset[str] = frozenset({"weight"}),
) -> SaveResult:
    mine = exchange or SingleRank()
    staged = stage(snapshot(step, state, forms, inexact), Arena(), Planner(), rank=mine.rank, size=mine.size)
    return writer.commit(FolderStore(root), staged, mine, chain=chain)


def manifest(root: Path, step: int) -> Manifest:
    return catalog.read_manifest(root, CheckpointName(step=step, attempt_id=ONE))


def read(root: Path, step: int | None = None, forms: Forms = WEIGHT) -> State:
    loaded = restore(root, SingleRank(), step=step).loaded
    assert loaded is not None
    assert step in (None, loaded.name.step)
    return {
        name: np.frombuffer(bytes(loaded.tensors[name]), KINDS[dtype]).reshape(shape)
        for name, (dtype, shape) in forms.items()
    }


def weights(seed: int = 0) -> State:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype("<f4") for name, (_, shape) in WEIGHT.items()}


def moved(state: State, elements: int, by: float) -> State:
    """Move this number of elements of the weight by this amount, spread over all of it."""
    weight = state["weight"].copy()
    weight.reshape(-1)[:: weight.size // elements][:elements] += np.float32(by)
    return {**state, "weight": weight}


# The bound


def numbers(bits: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    return (bits.astype("<u4") << 16).view("<f4") if dtype == "BF16" else bits


def assert_within(found: State, saved: State, forms: Forms, bound: float, inexact: set[str]) -> None:
    for name, (dtype, _) in forms.items():
        if name not in inexact:
            assert found[name].tobytes() == saved[name].tobytes(), name
            continue
        got, wanted = (numbers(state[name], dtype).astype("<f8") for state in (found, saved))
        odd = ~np.isfinite(wanted)
        assert found[name][odd].tobytes() == saved[name][odd].tobytes(), name
        with np.errstate(over="ignore"):
            assert np.all(np.abs(got[~odd] - wanted[~odd]) <= bound), name


def patch_of(document: Any) -> Any:
    return document["tensors"]["weight"]["patches"][0]


def places(*values: int) -> Callable[[Any, bytearray], None]:
    """Replace the first positions of a patch. Values above 1000 replace the last ones."""

    def change(document: Any, data: bytearray) -> None:
        patch = patch_of(document)
        raw = np.array(values, "<u4").tobytes()
        begin = patch["places"] + (patch["count"] * 4 - len(raw) if values[-1] > 1000 else 0)
        data[begin : begin + len(raw)] = raw

    return change
