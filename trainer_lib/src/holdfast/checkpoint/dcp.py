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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
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

from holdfast.checkpoint import commit, tier
from holdfast.checkpoint.boxes import tiles
from holdfast.checkpoint.collecting import uncollected
from holdfast.checkpoint.described import KEY, boxed, check_described
from holdfast.checkpoint.files import Buffer, make_folder, sync_folder, write_file
from holdfast.checkpoint.manifest import Chunk, FileRecord, Manifest, TensorRecord, check
from holdfast.checkpoint.names import CLAIMS, CommitName, parse_commit, slices_file, step_number, tensors_file
from holdfast.checkpoint.numerics import fingerprint
from holdfast.checkpoint.reader import Where, as_stores, newest
from holdfast.checkpoint.reading import Copies, Extent, extent, read_into
from holdfast.checkpoint.shard import METADATA, plan_shard, whole
from holdfast.checkpoint.slices import LEAST_BYTES, Slicer
from holdfast.checkpoint.state import Flat, check_name, flatten_values, torch_dtype, unflatten
from holdfast.checkpoint.stores import open_file
from holdfast.errors import CheckpointError, DamagedError, HoldfastError, StateError
from holdfast.worlds import Pair

_ID: Final = re.compile(r"(?:(?P<folder>.*)/)?step-(?P<step>\d{1,18})", re.ASCII)


def _identified(checkpoint_id: str | os.PathLike[str]) -> tuple[Path | None, int]:
    match = _ID.fullmatch(os.fspath(checkpoint_id))
    if match is None:
        raise CheckpointError(f"checkpoint_id is {checkpoint_id!r}: give <folder>/step-<number>")
    return None if match["folder"] is None else Path(match["folder"]), int(match["step"])


# Writing


class StorageWriter(storage.StorageWriter):
    """Writes one commit a save, into a folder that all ranks see. `checkpoint_id`, where given, says the step."""

    def __init__(self, folder: str | os.PathLike[str], *, step: int = 0) -> None:
        self._root = Path(folder)
        self._step = step_number(step)
        self._staging = ""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save; `checkpoint_id` is `step-<number>`, with or without a folder before it."""
        if checkpoint_id is not None:
            folder, self._step = _identified(checkpoint_id)
            self._root = folder or self._root

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse a folder that belongs to a job; remove what this writer's last save left, if it failed."""
        if is_coordinator and (self._root / CLAIMS).exists():
            raise CheckpointError(f"{self._root} belongs to a job (it has claims): save into a folder of its own")
        if self._staging:
            commit.discard(self._root, self._staging)

    def prepare_local_plan(self, plan: plans.SavePlan) -> plans.SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[plans.SavePlan]) -> list[plans.SavePlan]:
        """Begin the commit, and tell each rank its place in it."""
        make_folder(self._root)
        older = [name.pair.attempt for name in tier.list_commits(self._root) if name.step == self._step]
        name = CommitName(step=self._step, pair=Pair(0, 1 + max(older, default=0)))
        self._staging = commit.begin(self._root, name)
        return [
            replace(plan, storage_data={"staging": self._staging, "commit": str(name), "rank": rank})
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: plans.SavePlan, planner: plans.SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors as one file; values travel to the coordinator."""
        place = plan.storage_data
        values = [item for item in plan.items if item.type is plans.WriteItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type is not plans.WriteItemType.BYTE_IO]
        results = [_value(item, planner) for item in values]
        if tensors:
            results += _write_tensors(self._root / place["staging"], place, tensors, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: meta.Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the manifest: from now on it is a commit."""
        written = [result for rank in results for result in rank]
        manifest = _manifest(CommitName(step=self._step, pair=_pair(self._staging)), metadata, written, len(results))
        commit.publish(self._root, self._staging, manifest)
        self._staging = ""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a step."""
        return _ID.fullmatch(os.fspath(checkpoint_id)) is not None


def _pair(staging: str) -> Pair:
    name = parse_commit(staging)
    if name is None:
        raise CheckpointError("finish() was called before a save was begun")
    return name.pair


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
    folder: Path, place: Mapping[str, Any], items: Sequence[plans.WriteItem], planner: plans.SavePlanner
) -> list[WriteResult]:
    parts = Counter(item.index.fqn for item in items)
    keyed = {_item_key(item, alone=parts[item.index.fqn] == 1): item for item in items}
    flat = Flat(tree=None, tensors={key: _resolved(item, planner) for key, item in keyed.items()})
    plan = plan_shard(
        [whole(spec) for spec in flat.specs],
        metadata={"format": "pt", "commit": place["commit"], "rank": str(place["rank"])},
    )

    slicer = Slicer(plan.nbytes)

    def stream() -> Iterator[Buffer]:
        for data in chain([plan.header], map(flat.read, plan.pieces)):
            slicer.update(data)
            yield data

    file = tensors_file(place["rank"])
    written = write_file(folder / file, stream())
    record = written.to_json()
    if plan.nbytes >= LEAST_BYTES:
        write_file(folder / slices_file(file), [slicer.encode(written)])
    sync_folder(folder)
    return [
        WriteResult(
            index=keyed[piece.spec.name].index,
            size_in_bytes=piece.nbytes,
            storage_data={
                "file": file,
                "record": record,
                "dtype": piece.spec.dtype,
                "chunk": _chunk(keyed[piece.spec.name], file, offset, piece.nbytes).to_json(),
            },
        )
        for piece, offset in zip(plan.pieces, plan.offsets, strict=True)
    ]


def _resolved(item: plans.WriteItem, planner: plans.SavePlanner) -> torch.Tensor:
    value = planner.resolve_data(item)
    if not isinstance(value, torch.Tensor):
        raise StateError(f"{item.index.fqn}: the planner gave no tensor")
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


def _chunk(item: plans.WriteItem, file: str, offset: int, nbytes: int) -> Chunk:
    start, shape = _box(item)
    return Chunk(file=file, offset=offset, nbytes=nbytes, start=start, shape=shape)


@dataclass(frozen=True, kw_only=True)
class _Written:
    dtype: str
    chunk: Chunk


def _manifest(name: CommitName, metadata: meta.Metadata, written: Sequence[WriteResult], world: int) -> Manifest:
    files: dict[str, FileRecord] = {}
    boxes: dict[str, list[_Written]] = {}
    values: dict[str, Any] = {}
    for result in written:
        data = result.storage_data
        if "value" in data:
            values[result.index.fqn] = data["value"]
            continue
        files[data["file"]] = FileRecord.from_json(data["record"])
        one = _Written(dtype=data["dtype"], chunk=Chunk.from_json(data["chunk"]))
        boxes.setdefault(result.index.fqn, []).append(one)
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
        world_size=world,
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
        self._where: Where = Path(where) if isinstance(where, (str, os.PathLike)) else where
        self._step = None if step is None else step_number(step)
        self._name: CommitName | None = None
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
            which = "a commit" if self._step is None else f"a commit of step {self._step}"
            raise CheckpointError(f"there is no {which[2:]} that can be read in {self._where}")
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
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[plans.LoadPlan]) -> list[plans.LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: plans.LoadPlan, planner: plans.LoadPlanner) -> Future[None]:
        """Read the chunks that hold what is wanted, verified."""
        if self._manifest is None or self._name is None:
            raise CheckpointError("read_data() was called before read_metadata()")
        with uncollected():
            wanted = _wanted(plan, planner, self._manifest)
            extents = _by_file(wanted)
        openers = [partial(open_file, store, self._name) for store in as_stores(self._where)]
        with closing(Copies(openers=openers, records=self._manifest.files)) as copies:
            read_into(copies, extents)
        for one in wanted:
            one.deliver(planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a step."""
        return _ID.fullmatch(os.fspath(checkpoint_id)) is not None


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
        rows = target if straight else torch.empty(shape, dtype=dtype)
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
