"""The storage reader for `torch.distributed.checkpoint`.

A load reads only the chunks, or slices of chunks, that contain the requested bytes. The reader writes them directly
into the target tensors and verifies them. If a file is corrupt, the reader raises a `CorruptCheckpointError` that
names it, and the target tensors must not be used. Only a corrupt manifest makes the reader quarantine a checkpoint
and use the next older one.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint import storage
from torch.futures import Future

from holdfast.checkpoint.dcp.checkpoint_id import CHECKPOINT_ID, parse_checkpoint_id
from holdfast.checkpoint.dcp.metadata import KEY, check_described
from holdfast.checkpoint.format.file_names import CheckpointName, step_number
from holdfast.checkpoint.format.manifest import Manifest, digest
from holdfast.checkpoint.process_group_exchange import ranks
from holdfast.checkpoint.restore.candidates import Location, as_stores, is_gone
from holdfast.checkpoint.restore.chunk_reader import read_into
from holdfast.checkpoint.restore.copies import Copies
from holdfast.checkpoint.restore.memory_layout import Extent
from holdfast.checkpoint.restore.search import newest
from holdfast.checkpoint.state.dtypes import torch_dtype
from holdfast.checkpoint.state.unflatten import unflatten
from holdfast.checkpoint.stores.base import open_file
from holdfast.core.errors import CheckpointError, CorruptCheckpointError, HoldfastError
from holdfast.core.interpreter import uncollected
from holdfast.core.paths import local_path


class StorageReader(storage.StorageReader):
    """Reads what `StorageWriter` has written, at any world size and sharding."""

    def __init__(self, where: str | os.PathLike[str] | Location, *, step: int | None = None) -> None:
        self._location: Location = local_path(where) if isinstance(where, (str, os.PathLike)) else where
        self._step = None if step is None else step_number(step)
        self._name: CheckpointName | None = None
        self._manifest: Manifest | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load. `checkpoint_id` is `step-<number>`, optionally with a folder before it."""
        if checkpoint_id is not None:
            folder, self._step = parse_checkpoint_id(checkpoint_id)
            self._location = folder or self._location

    def read_metadata(self, *args: Any, **kwargs: Any) -> meta.Metadata:
        """Return the checkpoint's content. Raise `CorruptCheckpointError` if its record and its tensors differ."""
        found = newest(self._location, claims=(), job_uid="", step=self._step)
        if found is None:
            which = "checkpoint" if self._step is None else f"checkpoint of step {self._step}"
            raise CheckpointError(f"no readable {which} in {_urls(self._location)}")
        self._name, self._manifest = found
        check_described(self._manifest)
        stored = self._manifest.state.get(KEY)
        if stored is None:
            raise CheckpointError(
                f"{self._name} was not saved by torch.distributed.checkpoint: use holdfast.checkpoint.load"
            )
        with uncollected():
            return _metadata(stored)

    def set_up_storage_reader(self, metadata: meta.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the manifest has everything that a load needs."""

    def prepare_local_plan(self, plan: plans.LoadPlan) -> plans.LoadPlan:
        """Add the name and digest of the checkpoint that this rank found."""
        name, manifest = self._found()
        return replace(plan, storage_data={"checkpoint": str(name), "digest": digest(manifest)})

    def prepare_global_plan(self, plans: list[plans.LoadPlan]) -> list[plans.LoadPlan]:
        """Raise `CheckpointError` if ranks found different checkpoints. Nothing has been read at this point."""
        if len(plans) == 1 and self._step is None and ranks() > 1:
            raise CheckpointError(
                f"a rank of a world of {ranks()} looked for the newest checkpoint in {_urls(self._location)} "
                "separately, and other ranks may find another one. Nothing was loaded. Leave no_dist=True "
                "out or, if only one rank loads, select the step with StorageReader(…, step=…)"
            )
        found = [plan.storage_data or {} for plan in plans]
        other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
        if other is not None:
            one, two = (found[rank].get("checkpoint", "nothing") for rank in (0, other))
            raise CheckpointError(
                f"ranks found different checkpoints in {_urls(self._location)}: rank 0 found {one}, and rank "
                f"{other} found {('another one of the same name' if one == two else two)}. Nothing was "
                "loaded. On some hosts, the cache of a network file system shows a new checkpoint up to a "
                "minute late. Load again, or select the step with StorageReader(…, step=…)"
            )
        return plans

    def read_data(self, plan: plans.LoadPlan, planner: plans.LoadPlanner) -> Future[None]:
        """Read and verify the chunks that contain the requested data.

        Raise `CorruptCheckpointError` if a file is corrupt, and `CheckpointError` if the checkpoint was deleted.
        """
        name, manifest = self._found()
        with uncollected():
            requests = _requests(plan, planner, manifest)
            extents = _by_file(requests)
        openers = [partial(open_file, store, name) for store in as_stores(self._location)]
        try:
            with closing(Copies(openers=openers, records=manifest.files)) as copies:
                read_into(copies, extents)
        except CorruptCheckpointError as error:
            if not all(is_gone(store, name) for store in as_stores(self._location)):
                raise
            raise CheckpointError(
                f"{name} was deleted from {_urls(self._location)} while it was read. It is not corrupt. Load "
                "again, and keep more checkpoints in the job that saves there (keep_last, "
                "checkpoint.retention.keepLast)"
            ) from error
        for one in requests:
            one.deliver(planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _found(self) -> tuple[CheckpointName, Manifest]:
        if self._manifest is None or self._name is None:
            raise CheckpointError("a plan was created or read before read_metadata()")
        return self._name, self._manifest

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return CHECKPOINT_ID.fullmatch(os.fspath(checkpoint_id)) is not None


def _urls(where: Location) -> str:
    return " or ".join(store.url for store in as_stores(where))


def _metadata(stored: Mapping[str, Any]) -> meta.Metadata:
    return meta.Metadata(
        state_dict_metadata={
            **{fqn: _tensor_metadata(one) for fqn, one in stored["tensors"].items()},
            **{fqn: meta.BytesStorageMetadata() for fqn in stored["values"]},
        },
        planner_data={key: tuple(path) for key, path in stored["planner"].items()},
        storage_meta=meta.StorageMeta(),
    )


def _tensor_metadata(stored: Mapping[str, Any]) -> meta.TensorStorageMetadata:
    return meta.TensorStorageMetadata(
        properties=meta.TensorProperties(dtype=torch_dtype(stored["dtype"])),
        size=torch.Size(stored["size"]),
        chunks=[
            meta.ChunkStorageMetadata(offsets=torch.Size(box["offsets"]), sizes=torch.Size(box["sizes"]))
            for box in stored["boxes"]
        ],
    )


def _pickled(value: Any) -> io.BytesIO:
    """Pickle a value in memory, as DCP's planners expect it. The storage has no pickle."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def _value(fqn: str, value: Any) -> Any:
    """Return a saved value. Raise `CorruptCheckpointError` if the manifest has no valid value at this place."""
    try:
        return unflatten(value, _no_tensor)
    except (HoldfastError, MemoryError):
        raise
    except Exception as error:
        raise CorruptCheckpointError(f"MANIFEST.json: its value of {fqn[:80]!r} cannot be read: {error!r}") from error


def _no_tensor(name: str) -> torch.Tensor:
    raise CheckpointError(f"MANIFEST.json has the tensor {name} inside a value")


@dataclass(frozen=True, kw_only=True)
class _Request:
    """Rows of a box, which are read directly into their target, or into a buffer and then copied."""

    item: plans.ReadItem
    file: str
    offset: int
    rows: torch.Tensor
    target: torch.Tensor

    @classmethod
    def of(cls, item: plans.ReadItem, manifest: Manifest, planner: plans.LoadPlanner) -> _Request:
        index = item.storage_index
        stored = manifest.state[KEY]["tensors"][index.fqn]
        offsets = list(index.offset or [0] * len(stored["size"]))
        box = next(box for box in stored["boxes"] if box["offsets"] == offsets)
        record = manifest.tensors[box["tensor"]]
        if record.patches:
            raise CheckpointError(
                f"{index.fqn} is not exact, but checkpoints of torch.distributed.checkpoint always are"
            )
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
        return Extent.over(self.offset, self.rows.reshape(-1).view(torch.uint8).numpy().data)

    def deliver(self, planner: plans.LoadPlanner) -> None:
        if self.rows is not self.target:
            part = self.rows
            for dim in range(1, part.dim()):
                part = part.narrow(dim, self.item.storage_offsets[dim], self.item.lengths[dim])
            self.target.copy_(part)
        planner.commit_tensor(self.item, self.target)


def _requests(plan: plans.LoadPlan, planner: plans.LoadPlanner, manifest: Manifest) -> list[_Request]:
    """Locate the requested tensors.

    Values that are not tensors are in the manifest, and are passed to the planner at once.
    """
    values = manifest.state[KEY]["values"]
    requests: list[_Request] = []
    for item in plan.items:
        if item.type is plans.LoadItemType.BYTE_IO:
            fqn = item.storage_index.fqn
            planner.load_bytes(item, _pickled(_value(fqn, values[fqn])))
        else:
            requests.append(_Request.of(item, manifest, planner))
    return requests


def _by_file(requests: Sequence[_Request]) -> dict[str, list[Extent]]:
    found: dict[str, list[Extent]] = {}
    for one in requests:
        if one.file and one.rows.numel():
            found.setdefault(one.file, []).append(one.extent())
    return {file: sorted(many, key=lambda e: e.offset) for file, many in found.items()}
