"""Compares two checkpoints: names, shapes, dtypes, bytes, and the state outside of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.checkpoint.format.file_names import is_rank_file, shard_rank
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.mapping_order import MAP, mapping
from holdfast.checkpoint.format.records import CHUNK_BYTES, Chunk, TensorRecord
from holdfast.cli.checkpoints.access.commit_reader import Content, tensor_bytes
from holdfast.cli.checkpoints.access.progress_bar import Progress

_BLOCK: Final = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The differences from A to B."""

    added: tuple[str, ...]
    missing: tuple[str, ...]
    shapes: tuple[str, ...]
    dtypes: tuple[str, ...]
    changed: tuple[str, ...]
    state: tuple[str, ...]
    same: int

    @property
    def any(self) -> bool:
        return any((self.added, self.missing, self.shapes, self.dtypes, self.changed, self.state))

    def to_json(self) -> dict[str, Any]:
        return {
            "differs": self.any,
            "added": list(self.added),
            "missing": list(self.missing),
            "shape": list(self.shapes),
            "dtype": list(self.dtypes),
            "changed": list(self.changed),
            "state": list(self.state),
            "same": self.same,
        }


def compared_bytes(before: Manifest, after: Manifest) -> int:
    """Return how many bytes a comparison processes."""
    return sum(tensor_bytes(before.tensors[name]) for name in _comparable(before, after))


def _comparable(before: Manifest, after: Manifest) -> list[str]:
    both = before.tensors.keys() & after.tensors.keys()
    return sorted(name for name in both if _form(before.tensors[name]) == _form(after.tensors[name]))


def _form(record: TensorRecord) -> tuple[str, tuple[int, ...]]:
    return record.dtype, record.shape


def diff(before: Content, after: Content, shown: Progress) -> Difference:
    """Compare two checkpoints. Bytes are read only if the digests do not prove that they are equal."""
    before_tensors, after_tensors = before.manifest.tensors, after.manifest.tensors
    both = sorted(before_tensors.keys() & after_tensors.keys())
    same_form = _comparable(before.manifest, after.manifest)
    changed = [name for name in same_form if not _equal(before, after, name, shown)]
    return Difference(
        added=tuple(sorted(after_tensors.keys() - before_tensors.keys())),
        missing=tuple(sorted(before_tensors.keys() - after_tensors.keys())),
        shapes=tuple(name for name in both if before_tensors[name].shape != after_tensors[name].shape),
        dtypes=tuple(name for name in both if before_tensors[name].dtype != after_tensors[name].dtype),
        changed=tuple(changed),
        state=tuple(_paths(before.manifest.state, after.manifest.state, "state"))
        + tuple(_paths(before.manifest.data, after.manifest.data, "data"))
        + tuple(_ranks(before.manifest, after.manifest)),
        same=len(same_form) - len(changed),
    )


def _equal(before: Content, after: Content, name: str, shown: Progress) -> bool:
    before_record, after_record = before.manifest.tensors[name], after.manifest.tensors[name]
    total = tensor_bytes(before_record)
    if _same_digests(before.manifest, before_record, after.manifest, after_record):
        shown.add(total)
        return True
    left, right = memoryview(bytearray(min(_BLOCK, total))), memoryview(bytearray(min(_BLOCK, total)))
    for begin in range(0, total, _BLOCK):
        length = min(_BLOCK, total - begin)
        before.fill(before_record, begin, left[:length])
        after.fill(after_record, begin, right[:length])
        shown.add(length)
        if left[:length] != right[:length]:
            shown.add(total - begin - length)
            return False
    return True


def _same_digests(before: Manifest, before_record: TensorRecord, after: Manifest, after_record: TensorRecord) -> bool:
    """Whether equal digests prove that the bytes at the same places are equal, and there are no patches."""
    if before_record.chunks != after_record.chunks or before_record.patches or after_record.patches:
        return False
    return all(_digests(before, chunk) == _digests(after, chunk) for chunk in before_record.chunks)


def _digests(manifest: Manifest, chunk: Chunk) -> tuple[str, ...]:
    covering = slice(chunk.offset // CHUNK_BYTES, -(-(chunk.offset + chunk.nbytes) // CHUNK_BYTES))
    return manifest.files[chunk.file].chunks[covering]


def _ranks(before: Manifest, after: Manifest) -> Iterator[str]:
    """Yield the ranks whose own state differs. Worlds of different sizes have different ranks."""
    if before.world_size == after.world_size:
        files = filter(is_rank_file, before.files.keys() | after.files.keys())  # the world size may be false
        differ = (file for file in files if before.files.get(file) != after.files.get(file))
        yield from (f"state.{Path(file).stem}" for file in sorted(differ, key=shard_rank))


def _paths(before: Any, after: Any, path: str) -> Iterator[str]:
    """Yield the paths at which two JSON trees differ.

    The order of a mapping counts only if both trees record it: if ranks have different orders, a checkpoint has none.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        before_part, after_part = mapping(before), mapping(after)
        if before_part is None or after_part is None:
            before_part, after_part = before, after
        elif (
            MAP in before
            and MAP in after
            and before_part.keys() == after_part.keys()
            and list(before_part) != list(after_part)
        ):
            yield path
        for key in sorted(before_part.keys() | after_part.keys()):
            if key in before_part and key in after_part:
                yield from _paths(before_part[key], after_part[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (before_part, after_part) in enumerate(zip(before, after, strict=True)):
            yield from _paths(before_part, after_part, f"{path}.{index}")
    elif type(before) is not type(after) or before != after:
        yield path
