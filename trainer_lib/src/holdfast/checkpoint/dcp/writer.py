"""The storage writer for `torch.distributed.checkpoint` (DCP), with Holdfast's format and verification.

DCP keeps two facts in a pickle: the boxes that make up a tensor, and the path of each key. The writer stores both in
the manifest as JSON. A value that is not a tensor must fit Holdfast's trees. If a tensor's boxes cover it, the
checkpoint has it as one tensor, as in every other checkpoint. If the planner omits a part, each box is a tensor of
its own, named `<name>@<offsets>`. Earlier releases also stored boxes that are not rows under such names.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast.checkpoint.dcp.checkpoint_id import CHECKPOINT_ID, parse_checkpoint_id
from holdfast.checkpoint.dcp.metadata import KEY, boxed
from holdfast.checkpoint.folder import catalog, publish
from holdfast.checkpoint.format.coverage import check
from holdfast.checkpoint.format.file_names import (
    CLAIMS,
    MANIFEST,
    CheckpointName,
    slices_file,
    step_number,
    tensors_file,
)
from holdfast.checkpoint.format.manifest import LARGEST, Manifest, stamp
from holdfast.checkpoint.format.mapping_order import text_bytes, too_much
from holdfast.checkpoint.format.records import Chunk, FileRecord, TensorRecord
from holdfast.checkpoint.format.shard_layout import METADATA, plan_shard, whole
from holdfast.checkpoint.format.tensor_boxes import tiles
from holdfast.checkpoint.io.durable_files import Buffer, make_folder, sync_folder, write_file
from holdfast.checkpoint.io.slice_digests import LEAST_BYTES, Slicer
from holdfast.checkpoint.state.flatten import Flat, flatten_values
from holdfast.checkpoint.state.numerics import fingerprint
from holdfast.checkpoint.state.savable import check_name, check_tensor
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import CheckpointError, HoldfastError, StateError
from holdfast.core.paths import local_path

_FILE: Final = tensors_file(0)
"""The name of a rank's file in that rank's own folder."""
_MOVERS: Final = 16


class StorageWriter(storage.StorageWriter):
    """Writes one checkpoint per save, into a folder that all ranks share.

    `checkpoint_id`, if given, names the step.
    """

    def __init__(self, folder: str | os.PathLike[str], *, step: int = 0) -> None:
        self._root = local_path(folder)
        self._step = step_number(step)
        self._staging = ""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save. `checkpoint_id` is `step-<number>`, optionally with a folder before it."""
        if checkpoint_id is not None:
            folder, self._step = parse_checkpoint_id(checkpoint_id)
            self._root = folder or self._root

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Reject a save that cannot produce a single checkpoint, and remove the leftovers of this
        writer's last save.
        """
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                f"step {self._step} was not saved in {self._root}, and nothing was written: with "
                "use_collectives=False each rank would publish a checkpoint with only its own part. Leave "
                "use_collectives out. To plan only once, pass "
                "planner=DefaultSavePlanner(enable_plan_caching=True)"
            )
        if is_coordinator and (self._root / CLAIMS).exists():
            raise CheckpointError(f"{self._root} belongs to a job (it has claims): save to another folder")
        if self._staging:
            publish.discard(self._root, self._staging)
            self._staging = ""

    def prepare_local_plan(self, plan: plans.SavePlan) -> plans.SavePlan:
        """Add nothing to the plan."""
        return plan

    def prepare_global_plan(self, plans: list[plans.SavePlan]) -> list[plans.SavePlan]:
        """Add nothing: a planner may cache a plan for later saves (`enable_plan_caching`)."""
        return plans

    def write_data(self, plan: plans.SavePlan, planner: plans.SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors as one file into the rank's own folder. Values go to the coordinator."""
        values = [item for item in plan.items if item.type is plans.WriteItemType.BYTE_IO]
        results = _values(values, planner)
        tensors = [item for item in plan.items if item.type is not plans.WriteItemType.BYTE_IO]
        if tensors:
            results += _write_tensors(self._begin, self._step, tensors, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: meta.Metadata, results: list[list[WriteResult]]) -> None:
        """Collect the files of all ranks and publish the manifest, which completes the checkpoint."""
        older = [name.attempt_id.attempt for name in catalog.list_commits(self._root) if name.step == self._step]
        name = CheckpointName(step=self._step, attempt_id=AttemptId(0, 1 + max(older, default=0)))
        manifest = _manifest(name, metadata, results)
        folder = self._begin()
        folders = {rank: one.storage_data["folder"] for rank, many in enumerate(results) for one in _tensors(many)}
        with ThreadPoolExecutor(_MOVERS) as movers:  # a file server is slow for each move
            list(movers.map(partial(_move, self._root, folder), folders.values(), folders))
        try:
            publish.publish(self._root, folder.name, manifest)
        except HoldfastError:
            publish.discard(self._root, folder.name)
            raise
        self._staging = ""

    def _begin(self) -> Path:
        """Return the folder that only this rank writes into, and only during this save."""
        if not self._staging:
            make_folder(self._root)
            self._staging = publish.begin(self._root, CheckpointName(step=self._step, attempt_id=AttemptId(0, 0)))
        return self._root / self._staging

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return CHECKPOINT_ID.fullmatch(os.fspath(checkpoint_id)) is not None


def _tensors(results: Sequence[WriteResult]) -> Iterator[WriteResult]:
    return (result for result in results if "value" not in result.storage_data)


def _move(root: Path, target: Path, folder: str, rank: int) -> None:
    """Move a rank's file, and the digests of its slices, to their names in the checkpoint."""
    source, file = root / folder, tensors_file(rank)
    if (source, file) == (target, _FILE):
        return
    (source / _FILE).rename(target / file)
    with suppress(FileNotFoundError):  # a small file has no digests of slices
        (source / slices_file(_FILE)).rename(target / slices_file(file))
    with suppress(OSError):  # `prune` later removes a folder that cannot be removed now
        source.rmdir()


def _values(items: Sequence[plans.WriteItem], planner: plans.SavePlanner) -> list[WriteResult]:
    """Return the values of this rank. Raise `StateError` as soon as they exceed the size limit of a manifest."""
    results: list[WriteResult] = []
    held = 0
    for item in items:
        results.append(_value(item, planner))
        held += text_bytes(results[-1].storage_data["value"])
        if held > LARGEST:
            stored = ((one.index.fqn, one.storage_data["value"]) for one in results)
            raise StateError(
                f"nothing was saved: {MANIFEST} would have more than {LARGEST} bytes. {too_much(stored)}"
            )
    return results


def _value(item: plans.WriteItem, planner: plans.SavePlanner) -> WriteResult:
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise StateError(
            f"{item.index.fqn}: {type(planner).__name__} returns it only as a pickle: use DefaultSavePlanner"
        )
    flat = flatten_values({item.index.fqn: lookup(item.index)}, ordered=True)
    if flat.tensors:
        raise StateError(f"{item.index.fqn} contains arrays, and DCP treats it as one value: convert them to tensors")
    return WriteResult(index=item.index, size_in_bytes=0, storage_data={"value": flat.tree[item.index.fqn]})


def _write_tensors(
    begin: Callable[[], Path], step: int, items: Sequence[plans.WriteItem], planner: plans.SavePlanner
) -> list[WriteResult]:
    parts = Counter(item.index.fqn for item in items)
    keyed = {_item_key(item, single=parts[item.index.fqn] == 1): item for item in items}
    flat = Flat(tree=None, tensors={key: _resolved(item, planner) for key, item in keyed.items()})
    plan = plan_shard([whole(spec) for spec in flat.specs], metadata={"format": "pt", "step": str(step)})

    folder, slicer = begin(), Slicer(plan.nbytes)

    def stream() -> Iterator[Buffer]:
        for data in chain([plan.header], map(flat.read, plan.pieces)):
            slicer.update(data)
            yield data

    written = write_file(folder / _FILE, stream())
    record = written.to_json()
    if plan.nbytes >= LEAST_BYTES:
        write_file(folder / slices_file(_FILE), [slicer.encode(written)])
    sync_folder(folder)
    return [
        WriteResult(
            index=keyed[piece.spec.name].index,
            size_in_bytes=piece.nbytes,
            storage_data={
                "folder": folder.name,
                "record": record,
                "dtype": piece.spec.dtype,
                "chunk": _chunk(keyed[piece.spec.name], offset, piece.nbytes).to_json(),
            },
        )
        for piece, offset in zip(plan.pieces, plan.offsets, strict=True)
    ]


def _resolved(item: plans.WriteItem, planner: plans.SavePlanner) -> torch.Tensor:
    value = planner.resolve_data(item)
    if not isinstance(value, torch.Tensor):
        raise StateError(f"{item.index.fqn}: the planner returned no tensor")
    check_tensor(value, (item.index.fqn,))
    return value.detach()


def _box(item: plans.WriteItem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if item.tensor_data is None:
        raise StateError(f"{item.index.fqn}: the planner does not specify the part of the tensor")
    return tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)


def _item_key(item: plans.WriteItem, *, single: bool) -> str:
    name = check_name(item.index.fqn)
    if name == METADATA:
        raise StateError(f"a tensor in a safetensors file cannot have the name {name}: rename it")
    return name if single else boxed(name, _box(item)[0])


def _chunk(item: plans.WriteItem, offset: int, nbytes: int) -> Chunk:
    start, shape = _box(item)
    return Chunk(file=_FILE, offset=offset, nbytes=nbytes, start=start, shape=shape)


@dataclass(frozen=True, kw_only=True)
class _Written:
    dtype: str
    chunk: Chunk


def _manifest(name: CheckpointName, metadata: meta.Metadata, results: Sequence[Sequence[WriteResult]]) -> Manifest:
    values = {
        one.index.fqn: one.storage_data["value"] for many in results for one in many if "value" in one.storage_data
    }
    files: dict[str, FileRecord] = {}
    boxes: dict[str, list[_Written]] = {}
    for rank, many in enumerate(results):
        for result in _tensors(many):
            data, file = result.storage_data, tensors_file(rank)
            files[file] = FileRecord.from_json(data["record"])
            chunk = replace(Chunk.from_json(data["chunk"]), file=file)
            boxes.setdefault(result.index.fqn, []).append(_Written(dtype=data["dtype"], chunk=chunk))
    tensors: dict[str, TensorRecord] = {}
    described: dict[str, Any] = {}
    for fqn, found in metadata.state_dict_metadata.items():
        if isinstance(found, meta.TensorStorageMetadata):
            described[fqn], records = _described(fqn, tuple(found.size), boxes.get(fqn, []))
            tensors |= records
    planner = {key: list(path) for key, path in (metadata.planner_data or {}).items()}
    manifest = Manifest(
        step=name.step,
        attempt_id=name.attempt_id,
        job_uid="",
        publication="",
        run_id="",
        created=stamp(),
        world_size=len(results),
        mesh={},
        tensors=tensors,
        files=files,
        state={KEY: {"tensors": described, "values": values, "planner": planner}},
        data=None,
        numerics=fingerprint(),
    )
    check(manifest)
    return manifest


def _described(
    fqn: str, size: tuple[int, ...], found: Sequence[_Written]
) -> tuple[dict[str, Any], dict[str, TensorRecord]]:
    """Return DCP's description of a tensor, and the checkpoint's records of it."""
    parts = sorted(found, key=lambda one: one.chunk.start)
    dtype = parts[0].dtype if parts else "F32"
    hollow = 0 in size  # for a tensor without elements, rows count and boxes do not
    filled = tuple(one.chunk for one in parts if 0 not in (one.chunk.shape[:1] if hollow else one.chunk.shape))
    whole = hollow or tiles(size, ((chunk.start, chunk.shape) for chunk in filled))
    described = {
        "dtype": dtype,
        "size": list(size),
        "boxes": [
            {
                "offsets": list(one.chunk.start),
                "sizes": list(one.chunk.shape),
                "tensor": fqn if whole else boxed(fqn, one.chunk.start),
            }
            for one in parts
        ],
    }
    if whole:
        return described, {fqn: TensorRecord(dtype=dtype, shape=size, chunks=filled)}
    single = {boxed(fqn, one.chunk.start): replace(one.chunk, start=(0,) * len(one.chunk.start)) for one in parts}
    return described, {
        name: TensorRecord(dtype=dtype, shape=chunk.shape, chunks=(chunk,)) for name, chunk in single.items()
    }
