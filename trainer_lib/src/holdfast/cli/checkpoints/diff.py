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
    ours, theirs = before.manifest.tensors, after.manifest.tensors
    both = sorted(ours.keys() & theirs.keys())
    same_form = _comparable(before.manifest, after.manifest)
    changed = [name for name in same_form if not _equal(before, after, name, shown)]
    return Difference(
        added=tuple(sorted(theirs.keys() - ours.keys())),
        missing=tuple(sorted(ours.keys() - theirs.keys())),
        shapes=tuple(name for name in both if ours[name].shape != theirs[name].shape),
        dtypes=tuple(name for name in both if ours[name].dtype != theirs[name].dtype),
        changed=tuple(changed),
        state=tuple(_paths(before.manifest.state, after.manifest.state, "state"))
        + tuple(_paths(before.manifest.data, after.manifest.data, "data"))
        + tuple(_ranks(before.manifest, after.manifest)),
        same=len(same_form) - len(changed),
    )


def _equal(before: Content, after: Content, name: str, shown: Progress) -> bool:
    ours, theirs = before.manifest.tensors[name], after.manifest.tensors[name]
    total = tensor_bytes(ours)
    if _same_digests(before.manifest, ours, after.manifest, theirs):
        shown.add(total)
        return True
    left, right = memoryview(bytearray(min(_BLOCK, total))), memoryview(bytearray(min(_BLOCK, total)))
    for begin in range(0, total, _BLOCK):
        length = min(_BLOCK, total - begin)
        before.fill(ours, begin, left[:length])
        after.fill(theirs, begin, right[:length])
        shown.add(length)
        if left[:length] != right[:length]:
            shown.add(total - begin - length)
            return False
    return True


def _same_digests(before: Manifest, ours: TensorRecord, after: Manifest, theirs: TensorRecord) -> bool:
    """Whether equal digests prove that the bytes at the same places are equal, and there are no patches."""
    if ours.chunks != theirs.chunks or ours.patches or theirs.patches:
        return False
    return all(_digests(before, chunk) == _digests(after, chunk) for chunk in ours.chunks)


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

    The order of a mapping counts only if both trees record it: checkpoints of an earlier release do not.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        ours, theirs = mapping(before), mapping(after)
        if ours is None or theirs is None:
            ours, theirs = before, after
        elif MAP in before and MAP in after and ours.keys() == theirs.keys() and list(ours) != list(theirs):
            yield path
        for key in sorted(ours.keys() | theirs.keys()):
            if key in ours and key in theirs:
                yield from _paths(ours[key], theirs[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (ours, theirs) in enumerate(zip(before, after, strict=True)):
            yield from _paths(ours, theirs, f"{path}.{index}")
    elif type(before) is not type(after) or before != after:
        yield path
