"""Holdfast's storage for `torch.distributed.checkpoint`: its planners, and our format, commit and verification.

    dcp.save(state, storage_writer=StorageWriter("ckpt", step=100))
    dcp.load(state, storage_reader=StorageReader("ckpt"))        # the newest commit, or that of `step`

What DCP keeps in a pickle stands in the manifest as JSON: which boxes make up a tensor, and where a key stood. Values
that are no tensors must be such as our trees can say. A tensor whose boxes make it up is one tensor of the commit, as
in any other. Where a planner leaves a part out, its boxes are tensors of their own, `<name>@<offsets>`; so were, in
earlier releases, boxes that are not rows.

A load reads only the chunks, or slices of them, that hold bytes it needs, straight into the tensors that it is given,
and verifies them: damage is a DamagedError that names the file, and the tensors are then not to be used. Only a bad
manifest is moved aside, and the next older commit used.
"""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
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

from holdfast.checkpoint.dcp.metadata import KEY, boxed, check_described
from holdfast.checkpoint.folder import catalog, publish
from holdfast.checkpoint.format.file_names import (
    CLAIMS,
    MANIFEST,
    CheckpointName,
    slices_file,
    step_number,
    tensors_file,
)
from holdfast.checkpoint.format.manifest import LARGEST, Chunk, FileRecord, Manifest, TensorRecord, check, digest
from holdfast.checkpoint.format.mapping_order import text_bytes, too_much
from holdfast.checkpoint.format.shard_layout import METADATA, plan_shard, whole
from holdfast.checkpoint.format.tensor_boxes import tiles
from holdfast.checkpoint.io.durable_files import Buffer, make_folder, sync_folder, write_file
from holdfast.checkpoint.io.slice_digests import LEAST_BYTES, Slicer
from holdfast.checkpoint.process_group_exchange import ranks
from holdfast.checkpoint.restore.chunk_reader import Copies, Extent, extent, read_into
from holdfast.checkpoint.restore.search import Where, as_stores, is_gone, newest
from holdfast.checkpoint.state.flatten import Flat, check_name, check_tensor, flatten_values, torch_dtype, unflatten
from holdfast.checkpoint.state.numerics import fingerprint
from holdfast.checkpoint.stores.base import open_file
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import CheckpointError, DamagedError, HoldfastError, StateError
from holdfast.core.gc_pause import uncollected
from holdfast.core.paths import local_path

_ID: Final = re.compile(r"(?:(?P<folder>.*)/)?step-(?P<step>\d{1,18})", re.ASCII)
_FILE: Final = tensors_file(0)
"""What a rank calls its file in its own folder."""
_MOVERS: Final = 16


def _identified(checkpoint_id: str | os.PathLike[str]) -> tuple[Path | None, int]:
    match = _ID.fullmatch(os.fspath(checkpoint_id))
    if match is None:
        raise CheckpointError(f"checkpoint_id is {checkpoint_id!r}: give <folder>/step-<number>")
    return None if match["folder"] is None else local_path(match["folder"]), int(match["step"])


# Writing


class StorageWriter(storage.StorageWriter):
    """Writes one commit a save, into a folder that all ranks see. `checkpoint_id`, where given, says the step."""

    def __init__(self, folder: str | os.PathLike[str], *, step: int = 0) -> None:
        self._root = local_path(folder)
        self._step = step_number(step)
        self._staging = ""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save; `checkpoint_id` is `step-<number>`, with or without a folder before it."""
        if checkpoint_id is not None:
            folder, self._step = _identified(checkpoint_id)
            self._root = folder or self._root

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse a save that no single checkpoint can come from; remove what this writer's last save left."""
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                f"step {self._step} was not saved in {self._root}, and nothing was written: with "
                "use_collectives=False each rank would publish a checkpoint that has its own part only. Leave "
                "use_collectives out; to plan once only, give planner=DefaultSavePlanner(enable_plan_caching=True)"
            )
        if is_coordinator and (self._root / CLAIMS).exists():
            raise CheckpointError(f"{self._root} belongs to a job (it has claims): save into a folder of its own")
        if self._staging:
            publish.discard(self._root, self._staging)
            self._staging = ""

    def prepare_local_plan(self, plan: plans.SavePlan) -> plans.SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[plans.SavePlan]) -> list[plans.SavePlan]:
        """Add nothing: a planner may keep a plan and give it to later saves (`enable_plan_caching`)."""
        return plans

    def write_data(self, plan: plans.SavePlan, planner: plans.SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors as one file into a folder of its own; values travel to the coordinator."""
        values = [item for item in plan.items if item.type is plans.WriteItemType.BYTE_IO]
        results = _values(values, planner)
        tensors = [item for item in plan.items if item.type is not plans.WriteItemType.BYTE_IO]
        if tensors:
            results += _write_tensors(self._begin, self._step, tensors, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: meta.Metadata, results: list[list[WriteResult]]) -> None:
        """Bring the files of all ranks together and publish the manifest: from now on it is a commit."""
        older = [name.pair.attempt for name in catalog.list_commits(self._root) if name.step == self._step]
        name = CheckpointName(step=self._step, pair=AttemptId(0, 1 + max(older, default=0)))
        manifest = _manifest(name, metadata, results)
        folder = self._begin()
        folders = {rank: one.storage_data["folder"] for rank, many in enumerate(results) for one in _tensors(many)}
        with ThreadPoolExecutor(_MOVERS) as movers:  # a file server takes its time for each
            list(movers.map(partial(_move, self._root, folder), folders.values(), folders))
        try:
            publish.publish(self._root, folder.name, manifest)
        except HoldfastError:
            publish.discard(self._root, folder.name)
            raise
        self._staging = ""

    def _begin(self) -> Path:
        """The folder that this rank writes into, which no other rank and no other save does."""
        if not self._staging:
            make_folder(self._root)
            self._staging = publish.begin(self._root, CheckpointName(step=self._step, pair=AttemptId(0, 0)))
        return self._root / self._staging

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a step."""
        return _ID.fullmatch(os.fspath(checkpoint_id)) is not None


def _tensors(results: Sequence[WriteResult]) -> Iterator[WriteResult]:
    return (result for result in results if "value" not in result.storage_data)


def _move(root: Path, target: Path, folder: str, rank: int) -> None:
    """Move a rank's file, and the digests of its slices, under its name in the checkpoint."""
    source, file = root / folder, tensors_file(rank)
    if (source, file) == (target, _FILE):
        return
    (source / _FILE).rename(target / file)
    with suppress(FileNotFoundError):  # a small file has none
        (source / slices_file(_FILE)).rename(target / slices_file(file))
    with suppress(OSError):  # `prune` removes what cannot be removed now
        source.rmdir()


def _values(items: Sequence[plans.WriteItem], planner: plans.SavePlanner) -> list[WriteResult]:
    """The values of this rank; StateError as soon as they are more than a manifest may hold."""
    results: list[WriteResult] = []
    held = 0
    for item in items:
        results.append(_value(item, planner))
        held += text_bytes(results[-1].storage_data["value"])
        if held > LARGEST:
            told = ((one.index.fqn, one.storage_data["value"]) for one in results)
            raise StateError(f"nothing was saved: {MANIFEST} would have more than {LARGEST} bytes. {too_much(told)}")
    return results


def _value(item: plans.WriteItem, planner: plans.SavePlanner) -> WriteResult:
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise StateError(
            f"{item.index.fqn}: {type(planner).__name__} gives it only as a pickle: use DefaultSavePlanner"
        )
    flat = flatten_values({item.index.fqn: lookup(item.index)}, ordered=True)
    if flat.tensors:
        raise StateError(f"{item.index.fqn} has arrays in what DCP takes for one value: make them tensors")
    return WriteResult(index=item.index, size_in_bytes=0, storage_data={"value": flat.tree[item.index.fqn]})


def _write_tensors(
    begin: Callable[[], Path], step: int, items: Sequence[plans.WriteItem], planner: plans.SavePlanner
) -> list[WriteResult]:
    parts = Counter(item.index.fqn for item in items)
    keyed = {_item_key(item, alone=parts[item.index.fqn] == 1): item for item in items}
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
        raise StateError(f"{item.index.fqn}: the planner gave no tensor")
    check_tensor(value, (item.index.fqn,))
    return value.detach()


def _box(item: plans.WriteItem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if item.tensor_data is None:
        raise StateError(f"{item.index.fqn}: the planner does not say which part of the tensor it is")
    return tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)


def _item_key(item: plans.WriteItem, *, alone: bool) -> str:
    name = check_name(item.index.fqn)
    if name == METADATA:
        raise StateError(f"no tensor of a safetensors file can have the name {name}: give it another one")
    return name if alone else boxed(name, _box(item)[0])


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
        pair=name.pair,
        job_uid="",
        publication="",
        run_id="",
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
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
    """What DCP must know of a tensor, and the commit's records of it."""
    parts = sorted(found, key=lambda one: one.chunk.start)
    dtype = parts[0].dtype if parts else "F32"
    hollow = 0 in size  # of a tensor without elements rows count, and boxes do not
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
    return described, {boxed(fqn, one.chunk.start): _alone(one) for one in parts}


def _alone(one: _Written) -> TensorRecord:
    chunk = replace(one.chunk, start=(0,) * len(one.chunk.start))
    return TensorRecord(dtype=one.dtype, shape=chunk.shape, chunks=(chunk,))


# Reading


class StorageReader(storage.StorageReader):
    """Reads what `StorageWriter` has written, at any world size and sharding."""

    def __init__(self, where: str | os.PathLike[str] | Where, *, step: int | None = None) -> None:
        self._where: Where = local_path(where) if isinstance(where, (str, os.PathLike)) else where
        self._step = None if step is None else step_number(step)
        self._name: CheckpointName | None = None
        self._manifest: Manifest | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load; `checkpoint_id` is `step-<number>`, with or without a folder before it."""
        if checkpoint_id is not None:
            folder, self._step = _identified(checkpoint_id)
            self._where = folder or self._where

    def read_metadata(self, *args: Any, **kwargs: Any) -> meta.Metadata:
        """What the commit holds; DamagedError if what it says of its tensors is not so."""
        found = newest(self._where, claims=(), job_uid="", step=self._step)
        if found is None:
            which = "commit" if self._step is None else f"commit of step {self._step}"
            raise CheckpointError(f"there is no {which} that can be read in {_urls(self._where)}")
        self._name, self._manifest = found
        check_described(self._manifest)
        told = self._manifest.state.get(KEY)
        if told is None:
            raise CheckpointError(
                f"{self._name} was not saved by torch.distributed.checkpoint: use holdfast.checkpoint.load"
            )
        with uncollected():
            return _metadata(told)

    def set_up_storage_reader(self, metadata: meta.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """All that is needed is in the manifest."""

    def prepare_local_plan(self, plan: plans.LoadPlan) -> plans.LoadPlan:
        """Add which checkpoint this rank found."""
        name, manifest = self._found()
        return replace(plan, storage_data={"checkpoint": str(name), "digest": digest(manifest)})

    def prepare_global_plan(self, plans: list[plans.LoadPlan]) -> list[plans.LoadPlan]:
        """Refuse to load where ranks found different checkpoints: nothing has been read yet."""
        if len(plans) == 1 and self._step is None and ranks() > 1:
            raise CheckpointError(
                f"a rank of a world of {ranks()} looked for the newest checkpoint in {_urls(self._where)} by itself, "
                "and others may find another one. Nothing was loaded: leave no_dist=True out, or, if one rank loads "
                "alone, name the step with StorageReader(…, step=…)"
            )
        found = [plan.storage_data or {} for plan in plans]
        other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
        if other is not None:
            one, two = (found[rank].get("checkpoint", "nothing") for rank in (0, other))
            raise CheckpointError(
                f"ranks found different checkpoints in {_urls(self._where)}: rank 0 found {one}, and rank {other} "
                f"{'another one of the same name' if one == two else two}. Nothing was loaded. On some hosts, the "
                "cache of a network file system shows a new checkpoint up to a minute late: load again, or name the "
                "step with StorageReader(…, step=…)"
            )
        return plans

    def read_data(self, plan: plans.LoadPlan, planner: plans.LoadPlanner) -> Future[None]:
        """Read the chunks that hold what is wanted, verified. DamagedError, or CheckpointError if it was deleted."""
        name, manifest = self._found()
        with uncollected():
            wanted = _wanted(plan, planner, manifest)
            extents = _by_file(wanted)
        openers = [partial(open_file, store, name) for store in as_stores(self._where)]
        try:
            with closing(Copies(openers=openers, records=manifest.files)) as copies:
                read_into(copies, extents)
        except DamagedError as error:
            if not all(is_gone(store, name) for store in as_stores(self._where)):
                raise
            raise CheckpointError(
                f"{name} was deleted from {_urls(self._where)} while it was read, and is not damaged: load again, "
                "and let the job that commits there keep more (keep_last, checkpoint.retention.keepLast)"
            ) from error
        for one in wanted:
            one.deliver(planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _found(self) -> tuple[CheckpointName, Manifest]:
        if self._manifest is None or self._name is None:
            raise CheckpointError("a plan was made, or read, before read_metadata()")
        return self._name, self._manifest

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a step."""
        return _ID.fullmatch(os.fspath(checkpoint_id)) is not None


def _urls(where: Where) -> str:
    return " or ".join(store.url for store in as_stores(where))


def _metadata(told: Mapping[str, Any]) -> meta.Metadata:
    return meta.Metadata(
        state_dict_metadata={
            **{fqn: _tensor_metadata(one) for fqn, one in told["tensors"].items()},
            **{fqn: meta.BytesStorageMetadata() for fqn in told["values"]},
        },
        planner_data={key: tuple(path) for key, path in told["planner"].items()},
        storage_meta=meta.StorageMeta(),
    )


def _tensor_metadata(told: Mapping[str, Any]) -> meta.TensorStorageMetadata:
    return meta.TensorStorageMetadata(
        properties=meta.TensorProperties(dtype=torch_dtype(told["dtype"])),
        size=torch.Size(told["size"]),
        chunks=[
            meta.ChunkStorageMetadata(offsets=torch.Size(box["offsets"]), sizes=torch.Size(box["sizes"]))
            for box in told["boxes"]
        ],
    )


def _pickled(value: Any) -> io.BytesIO:
    """As DCP's planners want it; it was no pickle on the disk, and never leaves this process."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def _said(fqn: str, value: Any) -> Any:
    """A value as it was saved; DamagedError if what stands in its place is none."""
    try:
        return unflatten(value, _no_tensor)
    except (HoldfastError, MemoryError):
        raise
    except Exception as error:
        raise DamagedError(f"MANIFEST.json: its value of {fqn[:80]!r} cannot be read: {error!r}") from error


def _no_tensor(name: str) -> torch.Tensor:
    raise CheckpointError(f"MANIFEST.json has the tensor {name} in a value")


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """Rows of a box, read straight into where they belong, or beside it and then copied."""

    item: plans.ReadItem
    file: str
    offset: int
    rows: torch.Tensor
    target: torch.Tensor

    @classmethod
    def of(cls, item: plans.ReadItem, manifest: Manifest, planner: plans.LoadPlanner) -> _Wanted:
        """Find where it lies."""
        index = item.storage_index
        told = manifest.state[KEY]["tensors"][index.fqn]
        offsets = list(index.offset or [0] * len(told["size"]))
        box = next(box for box in told["boxes"] if box["offsets"] == offsets)
        record = manifest.tensors[box["tensor"]]
        if record.patches:
            raise CheckpointError(f"{index.fqn} is not exact, which no commit of torch.distributed.checkpoint is")
        begin = tuple(offsets) if box["tensor"] == index.fqn else (0,) * len(offsets)
        chunk = next((chunk for chunk in record.chunks if chunk.start == begin), None)
        sizes, lengths = tuple(box["sizes"]), tuple(item.lengths)
        target = planner.resolve_tensor(item).detach()
        shape = (lengths[0], *sizes[1:]) if sizes else ()
        dtype = torch_dtype(record.dtype)
        fits = lengths == shape and target.dtype == dtype
        straight = fits and target.device.type == "cpu" and target.is_contiguous()
        rows = target if straight else torch.empty(shape, dtype=dtype, device="cpu")
        if chunk is None:
            return cls(item=item, file="", offset=0, rows=rows, target=target)
        row = chunk.nbytes // sizes[0] if sizes and sizes[0] else 0
        low = item.storage_offsets[0] if sizes else 0
        return cls(item=item, file=chunk.file, offset=chunk.offset + low * row, rows=rows, target=target)

    def extent(self) -> Extent:
        """What to read."""
        return extent(self.offset, self.rows.reshape(-1).view(torch.uint8).numpy().data)

    def deliver(self, planner: plans.LoadPlanner) -> None:
        """Put it into the tensor that was given."""
        if self.rows is not self.target:
            part = self.rows
            for dim in range(1, part.dim()):
                part = part.narrow(dim, self.item.storage_offsets[dim], self.item.lengths[dim])
            self.target.copy_(part)
        planner.commit_tensor(self.item, self.target)


def _wanted(plan: plans.LoadPlan, planner: plans.LoadPlanner, manifest: Manifest) -> list[_Wanted]:
    """Where its tensors lie; what is no tensor is in the manifest, and given to the planner at once."""
    values = manifest.state[KEY]["values"]
    wanted: list[_Wanted] = []
    for item in plan.items:
        if item.type is plans.LoadItemType.BYTE_IO:
            fqn = item.storage_index.fqn
            planner.load_bytes(item, _pickled(_said(fqn, values[fqn])))
        else:
            wanted.append(_Wanted.of(item, manifest, planner))
    return wanted


def _by_file(wanted: Sequence[_Wanted]) -> dict[str, list[Extent]]:
    found: dict[str, list[Extent]] = {}
    for one in wanted:
        if one.file and one.rows.numel():
            found.setdefault(one.file, []).append(one.extent())
    return {file: sorted(many, key=lambda e: e.offset) for file, many in found.items()}
