"""The header of a safetensors file, parsed within bounds because its writer is not trusted. Pure.

A valid header names every byte of the data exactly once: no two tensors share bytes, and no tensor is outside the
file. The file's real length bounds the memory that a header can request.
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
from holdfast.core.errors import CorruptCheckpointError

LENGTH_BYTES: Final = 8
LARGEST: Final = 100_000_000
"""The largest size of a header in bytes, the same as in the safetensors library."""
_SMALL: Final = 1 << 20
"""The largest header that is parsed without a preceding check, in bytes.

Nested lists need twenty times as much memory as their text.
"""
_WINDOW: Final = 64 << 10
_LEAST_ENTRY: Final = len('"":{"dtype":"U8","shape":[],"data_offsets":[0,0]},')
_BOX: Final = re.compile(r"@\d+(,\d+)*\Z", re.ASCII)


class Source(Protocol):
    """The part of an open file's interface that is needed here."""

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill all of `target` from `offset` on."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a file. `offset` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def header_bytes(start: bytes | bytearray | memoryview, nbytes: int) -> int:
    """Return the bytes of the header, including its length field, from the first 8 bytes of a file.

    `nbytes` is the length of the file. Raise `CorruptCheckpointError` if the header cannot fit.
    """
    if nbytes < LENGTH_BYTES or len(start) < LENGTH_BYTES:
        raise CorruptCheckpointError(f"{nbytes} bytes are too few for a safetensors file")
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if length > min(LARGEST, nbytes - LENGTH_BYTES):
        raise CorruptCheckpointError(
            f"its header has {length} bytes according to its length field, but the file has {nbytes}"
        )
    return LENGTH_BYTES + length


def parse(start: bytes | bytearray | memoryview, nbytes: int) -> dict[str, Entry]:
    """Return the tensors of a file of `nbytes` bytes that begins with `start`.

    Raise `CorruptCheckpointError` if it is not valid.
    """
    begin = header_bytes(start, nbytes)
    if len(start) < begin:
        raise CorruptCheckpointError("its header is incomplete")
    try:
        raw = bytes(start[LENGTH_BYTES:begin])
        _check_shape(raw)
        table = json.loads(raw, object_pairs_hook=_unique)
        if not isinstance(table, dict):
            raise ValueError("it is not a JSON object")
        _check_metadata(table.pop(METADATA, None))
        entries = {name: _entry(value, begin) for name, value in table.items()}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"its header cannot be read: {f'{type(error).__name__}: {error}'[:200]}"
        ) from error
    _check_cover(entries, begin, nbytes)
    return entries


def _check_shape(raw: bytes) -> None:
    """Check a large header before it is parsed: its objects and lists must not exceed those of a
    table of its length.
    """
    if len(raw) <= _SMALL:
        return
    objects = lists = 0
    for part in _outside_strings(raw):
        objects, lists = objects + part.count(b"{"), lists + part.count(b"[")
    if lists > 2 * objects or objects > 2 + len(raw) // _LEAST_ENTRY:
        raise ValueError(f"{objects} objects and {lists} lists are not a table of tensors")


def _outside_strings(raw: bytes) -> Iterator[bytes]:
    """Yield the parts of a JSON text that are outside strings, in small pieces to limit the memory."""
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
        raise ValueError("a name occurs twice")
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
            raise CorruptCheckpointError(f"its header leaves a gap or an overlap before {name[:80]!r}")
        position += entry.nbytes
    if position != nbytes:
        raise CorruptCheckpointError(f"its header describes {position} bytes, and the file has {nbytes}")


def check_header(file: str, start: bytes | bytearray | memoryview, manifest: Manifest) -> None:
    """Check that a file's header agrees with the manifest, so that every reader sees the same tensors.

    The header may also name empty parts of a tensor that both have: DCP writes them for a rank without rows.
    """
    try:
        entries = parse(start, manifest.files[file].nbytes)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{file}: {error}") from error
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
            raise CorruptCheckpointError(f"{file}: its header and MANIFEST.json differ for {names[0][:80]!r}")


def _entries(name: str, tensor: TensorRecord, file: str, *, stacked: bool) -> Iterator[tuple[str, Entry]]:
    """Yield the entries that a file has for a tensor, with their names.

    In a delta, the rows that changed are `stacked`: they are one entry without gaps.
    """
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
    """Return the tensor that a box is part of.

    The name `<name>@<offsets>` may be in a file that has several boxes of the tensor. It may also be in a manifest
    with boxes that are not rows (see `dcp`). It need not be in both.
    """
    return _BOX.sub("", name)


def check_json(file: str, data: bytes | bytearray) -> None:
    """Check that per-rank state is JSON."""
    try:
        json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{file} is not JSON: {error}") from error


def check_source(source: Source, *, file: str, manifest: Manifest) -> None:
    """Check the header of an open file, of which nothing else is read. Other kinds of files are not checked.

    A file of an earlier checkpoint may hold more than this manifest names. Digests cover the part that is used.
    """
    if not file.endswith(".safetensors") or inherited(file) is not None:
        return
    nbytes = manifest.files[file].nbytes
    start = bytearray(min(LENGTH_BYTES, nbytes))
    source.read_into(0, memoryview(start))
    try:
        start = bytearray(header_bytes(start, nbytes))
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{file}: {error}") from error
    source.read_into(0, memoryview(start))
    check_header(file, start, manifest)
