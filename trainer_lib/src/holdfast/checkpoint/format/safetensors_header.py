"""The header of a safetensors file: what a stranger may have written, read within bounds. Pure.

A header that passes names every byte of the data exactly once, so no two tensors share bytes and none lies outside
the file; and the memory that it can ask for is bounded by the file's real length.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from holdfast.checkpoint.format.file_names import inherited
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.records import PLACE, PLACES, VALUES, TensorRecord, whole_numbers
from holdfast.checkpoint.format.shard_layout import ITEM_BYTES, METADATA
from holdfast.core.errors import DamagedError

LENGTH_BYTES: Final = 8
LARGEST: Final = 100_000_000
"""Bytes of a header, as safetensors itself has it."""
_SMALL: Final = 1 << 20
"""Bytes of a header that is parsed without another look: lists in lists take twenty times as much memory."""
_WINDOW: Final = 64 << 10
_LEAST_ENTRY: Final = len('"":{"dtype":"U8","shape":[],"data_offsets":[0,0]},')
_BOX: Final = re.compile(r"@\d+(,\d+)*\Z", re.ASCII)


class Source(Protocol):
    """What is needed of an open file."""

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill all of `target`."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a file; `offset` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def header_bytes(start: bytes | bytearray | memoryview, nbytes: int) -> int:
    """From the first 8 bytes of a file of this length: how many bytes header and length take. DamagedError."""
    if nbytes < LENGTH_BYTES or len(start) < LENGTH_BYTES:
        raise DamagedError(f"{nbytes} bytes are too few for a safetensors file")
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if length > min(LARGEST, nbytes - LENGTH_BYTES):
        raise DamagedError(f"its header claims {length} bytes, in a file of {nbytes}")
    return LENGTH_BYTES + length


def parse(start: bytes | bytearray | memoryview, nbytes: int) -> dict[str, Entry]:
    """The tensors of a file of this length that begins with `start`; DamagedError if any rule is broken."""
    begin = header_bytes(start, nbytes)
    if len(start) < begin:
        raise DamagedError("its header is not all there")
    try:
        raw = bytes(start[LENGTH_BYTES:begin])
        _check_shape(raw)
        table = json.loads(raw, object_pairs_hook=_unique)
        if not isinstance(table, dict):
            raise ValueError("it is no JSON object")
        _check_metadata(table.pop(METADATA, None))
        entries = {name: _entry(value, begin) for name, value in table.items()}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedError(f"its header cannot be read: {f'{type(error).__name__}: {error}'[:200]}") from error
    _check_cover(entries, begin, nbytes)
    return entries


def _check_shape(raw: bytes) -> None:
    """Before a large one is parsed: it has no more objects and lists than tensors of its length can have."""
    if len(raw) <= _SMALL:
        return
    objects = lists = 0
    for part in _outside_strings(raw):
        objects, lists = objects + part.count(b"{"), lists + part.count(b"[")
    if lists > 2 * objects or objects > 2 + len(raw) // _LEAST_ENTRY:
        raise ValueError(f"{objects} objects and {lists} lists are no table of tensors")


def _outside_strings(raw: bytes) -> Iterator[bytes]:
    """What of some JSON is in no string, a little at a time: in pieces it takes many times as much memory."""
    plain, within = raw.replace(b"\\\\", b"").replace(b'\\"', b""), 0
    for begin in range(0, len(plain), _WINDOW):
        parts = plain[begin : begin + _WINDOW].split(b'"')
        yield b"".join(parts[within::2])
        within = (within + len(parts) - 1) % 2


def _check_metadata(found: Any) -> None:
    if found is not None and not (isinstance(found, dict) and all(isinstance(one, str) for one in found.values())):
        raise ValueError(f"{METADATA} does not map text to text")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _entry(value: Mapping[str, Any], begin: int) -> Entry:
    first, end = whole_numbers(value["data_offsets"])
    shape = whole_numbers(value["shape"])
    nbytes = ITEM_BYTES[value["dtype"]] * math.prod(shape)
    if end - first != nbytes:
        raise ValueError(f"{end - first} bytes for {value['dtype']} of shape {list(shape)}")
    return Entry(dtype=value["dtype"], shape=shape, offset=begin + first, nbytes=nbytes)


def _check_cover(entries: Mapping[str, Entry], begin: int, nbytes: int) -> None:
    position = begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != position:
            raise DamagedError(f"its header leaves a gap or an overlap before {name[:80]!r}")
        position += entry.nbytes
    if position != nbytes:
        raise DamagedError(f"its header speaks of {position} bytes, and the file has {nbytes}")


def check_header(file: str, start: bytes | bytearray | memoryview, manifest: Manifest) -> None:
    """A file's own header says what the manifest says of it, so that every reader sees the same tensors. Of a tensor
    that both have it may name parts without elements too: such are what a rank without a row has for DCP."""
    try:
        entries = parse(start, manifest.files[file].nbytes)
    except DamagedError as error:
        raise DamagedError(f"{file}: {error}") from error
    expected = Counter(
        (_tensor(entry_name), entry)
        for name, tensor in manifest.tensors.items()
        for entry_name, entry in _entries(name, tensor, file, stacked=manifest.parent is not None)
    )
    found = Counter((_tensor(name), entry) for name, entry in entries.items())
    if found != expected:
        known = set(map(_tensor, manifest.tensors))
        more = [name for name, entry in found - expected if entry.nbytes or name not in known]
        names = sorted(more + [name for name, _ in expected - found])
        if names:
            raise DamagedError(f"{file}: its header and MANIFEST.json disagree about {names[0][:80]!r}")


def _entries(name: str, tensor: TensorRecord, file: str, *, stacked: bool) -> Iterator[tuple[str, Entry]]:
    """What a file has of a tensor, and under which name. Of a delta the rows that changed are `stacked`: one entry,
    without gaps."""
    here = sorted((chunk for chunk in tensor.chunks if chunk.file == file), key=lambda chunk: chunk.offset)
    entries = [
        Entry(dtype=tensor.dtype, shape=chunk.shape, offset=chunk.offset, nbytes=chunk.nbytes) for chunk in here
    ]
    if stacked and len(entries) > 1:
        rows = sum(entry.shape[0] for entry in entries)
        total = sum(entry.nbytes for entry in entries)
        entries = [replace(entries[0], shape=(rows, *entries[0].shape[1:]), nbytes=total)]
    yield from ((name, entry) for entry in entries)
    for patch in (patch for patch in tensor.patches if patch.file == file):
        for end, dtype, offset in ((PLACES, PLACE, patch.places), (VALUES, tensor.dtype, patch.values)):
            nbytes = patch.count * ITEM_BYTES[dtype]
            yield name + end, Entry(dtype=dtype, shape=(patch.count,), offset=offset, nbytes=nbytes)


def _tensor(name: str) -> str:
    """The tensor of which a box is a part. A box may be called `<name>@<offsets>` in the one place and not in the
    other: in a file where it is one of several, in a manifest where boxes are not rows (see `dcp`)."""
    return _BOX.sub("", name)


def check_json(file: str, data: bytes | bytearray) -> None:
    """What is a rank's alone is JSON."""
    try:
        json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{file} is not JSON: {error}") from error


def check_source(source: Source, *, file: str, manifest: Manifest) -> None:
    """The same for an open file, of which no more is read than its header; of any other file nothing. One of an
    earlier commit may hold more than this manifest names: what counts of it is covered by digests."""
    if not file.endswith(".safetensors") or inherited(file) is not None:
        return
    nbytes = manifest.files[file].nbytes
    start = bytearray(min(LENGTH_BYTES, nbytes))
    source.read_into(0, memoryview(start))
    try:
        start = bytearray(header_bytes(start, nbytes))
    except DamagedError as error:
        raise DamagedError(f"{file}: {error}") from error
    source.read_into(0, memoryview(start))
    check_header(file, start, manifest)
