"""Exports a checkpoint to safetensors files: one, or several with an index as Hugging Face has. Imports no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.mapping_order import mapping
from holdfast.checkpoint.format.shard_layout import METADATA, ShardPlan, TensorSpec, plan_shard, whole
from holdfast.checkpoint.io.durable_files import Buffer, create_durably, sync_folder, write_file
from holdfast.cli.checkpoints.access.commit_reader import Content
from holdfast.cli.checkpoints.access.progress_bar import Progress
from holdfast.core.errors import CheckpointError, CorruptCheckpointError, UsageError

_BLOCK: Final = 8 << 20
_STEM: Final = "model"
WHOLE: Final = "model"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The tensors of an object, from new name to name in the checkpoint. `tied`: further names of the same."""

    tensors: Mapping[str, str]
    tied: Mapping[str, str]
    left_out: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Exported:
    files: tuple[Path, ...]
    nbytes: int


def weights(manifest: Manifest, name: str) -> Weights:
    """Return the flat state dict of an object. Other values than tensors are skipped.

    Raises CorruptCheckpointError if the manifest's state is not valid.
    """
    try:
        chosen = _chosen(manifest, name)
        "".join((*chosen.tensors, *chosen.tied)).encode()
    except (KeyError, TypeError, AttributeError, IndexError, UnicodeEncodeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"MANIFEST.json: object {name!r} is not a state of tensors: {error!r}"
        ) from error
    missing = sorted(set(chosen.tensors.values()) - manifest.tensors.keys())
    if missing:
        raise CorruptCheckpointError(
            f"MANIFEST.json: object {name!r} names a tensor that the checkpoint does not have: {missing[0]!r}"
        )
    return chosen


def _chosen(manifest: Manifest, name: str) -> Weights:
    if isinstance(manifest.state, dict) and "dcp" in manifest.state:
        return _of_dcp(manifest.state["dcp"], name)
    objects = manifest.state.get("objects") if isinstance(manifest.state, dict) else None
    if not isinstance(objects, dict) or name not in objects:
        known = ", ".join(sorted(objects)) if isinstance(objects, dict) else "none"
        raise UsageError(f"the checkpoint has no object {name!r}: set --object to one of {known}")
    tensors: dict[str, str] = {}
    tied: dict[str, str] = {}
    first: dict[str, str] = {}
    left_out = []
    for key, leaf in _leaves(objects[name], ""):
        source = _tensor(leaf)
        if source is not None and (key in tensors or key in tied or key == METADATA):
            raise UsageError(
                f"a safetensors file cannot have the name {key!r} for another tensor: rename it in the model"
            )
        if source is None:
            left_out.append(key)
        elif source in first:
            tied[key] = first[source]
        else:
            tensors[key] = first.setdefault(source, key) and source
    if not tensors:
        raise UsageError(f"object {name!r} has no tensors")
    return Weights(tensors=tensors, tied=tied, left_out=tuple(left_out))


def _of_dcp(stored: Mapping[str, Any], name: str) -> Weights:
    """Return the weights of a checkpoint that DCP wrote: its keys below `name`, or all if it has only a model."""
    below = [key for key in stored["tensors"] if key.startswith(f"{name}.")]
    if not below and name != WHOLE:
        raise UsageError(
            f"the checkpoint was created through DCP and has no key below {name!r}: run 'holdfast checkpoints show'"
        )
    tensors = {}
    for key in below or stored["tensors"]:
        if any(box["tensor"] != key for box in stored["tensors"][key]["boxes"]):
            raise CheckpointError(f"{key} is stored in separate boxes: load it with dcp.load, and save the result")
        tensors[key.removeprefix(f"{name}.")] = key
    return Weights(tensors=tensors, tied={}, left_out=tuple(sorted(stored["values"])))


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    found = mapping(tree)
    if found is not None:
        for key, item in found.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    else:
        yield path, tree


def _tensor(leaf: Any) -> str | None:
    if not isinstance(leaf, dict) or len(leaf) != 1:
        return None
    mark, value = next(iter(leaf.items()))
    if mark in ("$tensor", "$array"):
        return str(value)
    return str(value[0]) if mark == "$rows" else None


def export(content: Content, chosen: Weights, target: Path, *, most: int, shown: Progress) -> Exported:
    """Write one file, or several of at most `most` bytes and then an index. Existing files are not replaced."""
    specs = [_spec(content.manifest, name, source) for name, source in chosen.tensors.items()]
    single = target.suffix == ".safetensors"
    folder = target.parent if single else target
    shards = [specs] if single else _shards(specs, most)
    names = [target.name] if single else _names(len(shards))
    index = folder / f"{_STEM}.safetensors.index.json" if len(shards) > 1 else None
    files = [*(folder / name for name in names), *([index] if index else [])]
    _refuse_taken(files)
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder / f".tmp-{uuid4().hex}"
    staging.mkdir()
    try:
        metadata = {"format": "pt", **chosen.tied}
        for name, shard in zip(names, shards, strict=True):
            plan = plan_shard(map(whole, shard), metadata=metadata)
            write_file(staging / name, _parts(content, chosen, plan, shown))
        if index:
            table = {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard}
            document = {"metadata": {"total_size": _total(specs)}, "weight_map": dict(sorted(table.items()))}
            create_durably(staging / index.name, json.dumps(document, indent=2).encode() + b"\n")
        _refuse_taken(files)
        _publish(staging, files)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Exported(files=tuple(files), nbytes=_total(specs))


def _refuse_taken(files: Sequence[Path]) -> None:
    for file in files:
        if file.exists():
            raise CheckpointError(f"{file} exists already: choose another path. Nothing was changed")


def _publish(staging: Path, files: Sequence[Path]) -> None:
    """Publish all files or none: a partial export would block the next one."""
    moved = []
    try:
        for file in files:
            (staging / file.name).rename(file)
            moved.append(file)
        sync_folder(staging.parent)
    except BaseException:
        for file in moved:
            file.unlink(missing_ok=True)
        raise


def _total(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in specs)


def _spec(manifest: Manifest, name: str, source: str) -> TensorSpec:
    record = manifest.tensors[source]
    return TensorSpec(name=name, dtype=record.dtype, shape=record.shape)


def _shards(specs: Sequence[TensorSpec], most: int) -> list[list[TensorSpec]]:
    """Split the tensors in order, with full files. A tensor that is larger than `most` gets its own file."""
    shards: list[list[TensorSpec]] = []
    filled = most
    for spec in specs:
        if filled + spec.nbytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    return shards


def _names(count: int) -> list[str]:
    if count == 1:
        return [f"{_STEM}.safetensors"]
    return [f"{_STEM}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _parts(content: Content, chosen: Weights, plan: ShardPlan, shown: Progress) -> Iterator[Buffer]:
    yield plan.header
    for piece in plan.pieces:
        for block in _blocks(content, chosen.tensors[piece.spec.name], piece.nbytes):
            shown.add(block.nbytes)
            yield block


def _blocks(content: Content, source: str, nbytes: int) -> Iterator[memoryview]:
    window = memoryview(bytearray(min(_BLOCK, nbytes)))
    for begin in range(0, nbytes, _BLOCK):
        block = window[: min(_BLOCK, nbytes - begin)]
        content.fill(content.manifest.tensors[source], begin, block)
        yield block
