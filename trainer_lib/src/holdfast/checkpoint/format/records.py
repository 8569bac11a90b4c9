"""The records of a manifest: files, and tensors that consist of chunks and patches. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from holdfast.checkpoint.format.shard_layout import ITEM_BYTES
from holdfast.core.limits import LARGEST_THRESHOLD

CHUNK_BYTES: Final = 8 << 20

_MOST: Final = 1 << 62  # limit of any number of bytes, so that a sum or product of a few does not overflow in torch
_MOST_DIMENSIONS: Final = 64
MOST_PATCHED: Final = 1 << 32  # elements of a box, because places are 32-bit numbers
PLACE: Final = "U32"
FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
"""The dtypes of tensors that may be patched."""
PLACES: Final = "~places"
VALUES: Final = "~values"
"""The suffixes of a patch's names in a file. In a tensor's name, only 0 or 1 can follow a `~`."""


def whole_number(value: Any) -> int:
    """Return a JSON number of bytes or similar unchanged. Raise `ValueError` for anything else."""
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"{str(value)[:40]!r} is not a valid number")
    return value


def whole_numbers(value: Any) -> tuple[int, ...]:
    """Return a shape or similar as a tuple. Raise `ValueError` for anything else, or if the product is too large."""
    product = 1
    for number in listed(value)[:_MOST_DIMENSIONS]:
        product *= whole_number(number) or 1
    if len(value) > _MOST_DIMENSIONS or product > _MOST:
        raise ValueError(f"{str(value)[:40]} is too large")
    return tuple(value)


def listed(value: Any) -> list[Any]:
    """Return a list unchanged. Raise `TypeError` for anything else."""
    if not isinstance(value, list):
        raise TypeError("not a list")  # a string would pass as a list of its characters
    return value


def _bound(value: Any) -> float:
    if type(value) is not float or not 0 < value <= LARGEST_THRESHOLD:
        raise ValueError(f"{str(value)[:40]!r} is not a valid bound")
    return value


def string(value: Any) -> str:
    """Return a string unchanged. Raise `TypeError` for anything else."""
    if not isinstance(value, str):
        raise TypeError("not a string")
    return value


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file of the checkpoint: its length, its digest, and the digest of each 8 MiB chunk."""

    nbytes: int
    digest: str
    chunks: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.nbytes, "digest": self.digest, "chunks": list(self.chunks)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FileRecord:
        return cls(
            nbytes=whole_number(value["bytes"]),
            digest=string(value["digest"]),
            chunks=tuple(map(string, listed(value["chunks"]))),
        )


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The place of a box of a tensor: `start` and `shape` within the tensor, `offset` within the file."""

    file: str
    offset: int
    nbytes: int
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "offset": self.offset,
            "bytes": self.nbytes,
            "start": list(self.start),
            "shape": list(self.shape),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Chunk:
        return cls(
            file=string(value["file"]),
            offset=whole_number(value["offset"]),
            nbytes=whole_number(value["bytes"]),
            start=whole_numbers(value["start"]),
            shape=whole_numbers(value["shape"]),
        )


@dataclass(frozen=True, kw_only=True)
class Patch:
    """Elements of a box of rows that differ from the chunks.

    The file has `count` places in the box, and their values. All other elements of the box differ from what was saved
    by at most `bound`.
    """

    file: str
    places: int
    values: int
    count: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    bound: float

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "start": list(self.start), "shape": list(self.shape)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Patch:
        return cls(
            file=string(value["file"]),
            places=whole_number(value["places"]),
            values=whole_number(value["values"]),
            count=whole_number(value["count"]),
            start=whole_numbers(value["start"]),
            shape=whole_numbers(value["shape"]),
            bound=_bound(value["bound"]),
        )


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """A tensor's dtype, its global shape, the chunks that it consists of, and the patches to apply to them."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    patches: tuple[Patch, ...] = ()

    @property
    def in_rows(self) -> bool:
        """Whether all chunks are complete rows, so that the bytes are in order. Otherwise the chunks are boxes."""
        return all(chunk.shape[1:] == self.shape[1:] for chunk in self.chunks)

    @property
    def bound(self) -> float | None:
        """The largest difference of an element from what was saved; None if the tensor is exact."""
        return max((patch.bound for patch in self.patches), default=None)

    @property
    def spans(self) -> Iterator[tuple[str, int, int]]:
        """The places of the tensor's bytes: file, offset and number of bytes."""
        for chunk in self.chunks:
            yield chunk.file, chunk.offset, chunk.nbytes
        for patch in self.patches:
            yield patch.file, patch.places, patch.count * ITEM_BYTES[PLACE]
            yield patch.file, patch.values, patch.count * ITEM_BYTES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        patches = {"patches": [patch.to_json() for patch in self.patches]} if self.patches else {}
        chunks = [chunk.to_json() for chunk in self.chunks]
        return {"dtype": self.dtype, "shape": list(self.shape), "chunks": chunks, **patches}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TensorRecord:
        return cls(
            dtype=string(value["dtype"]),
            shape=whole_numbers(value["shape"]),
            chunks=tuple(Chunk.from_json(chunk) for chunk in listed(value["chunks"])),
            patches=tuple(Patch.from_json(patch) for patch in listed(value.get("patches", []))),
        )


class Records(dict[str, TensorRecord]):
    """The records of tensors, which never change.

    Consecutive checkpoints share most records. Their text, and the check that they fit their files, are therefore
    computed only once.
    """

    fit: Mapping[str, int] | None = None
    """The sizes in bytes of the files of tensors for which the records were checked."""

    @cached_property
    def boxed(self) -> bool:
        """Whether any record has boxes that are not rows."""
        return not all(record.in_rows for record in self.values())

    @cached_property
    def text(self) -> str:
        return canonical({name: record.to_json() for name, record in self.items()})


def canonical(value: Any) -> str:
    """Return the canonical JSON of a value: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
