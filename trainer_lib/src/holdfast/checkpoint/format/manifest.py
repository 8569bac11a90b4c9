"""`MANIFEST.json`: what a commit holds and the digest of every byte of it. Pure.

The file is canonical JSON (sorted keys, no spaces) and ends with the digest of itself, so a manifest is either
exactly what was written or damaged. Later versions keep that envelope: a whole manifest of an unknown version is
told from a damaged one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import xxhash

from holdfast.checkpoint.format.file_names import inherited, is_shard, parse_commit, shard_rank
from holdfast.checkpoint.format.shard_layout import ITEM_BYTES
from holdfast.checkpoint.format.tensor_boxes import tiles
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import DamagedError, UnknownFormatError
from holdfast.core.gc_pause import uncollected
from holdfast.core.limits import LARGEST_THRESHOLD

FORMAT: Final = "holdfast-checkpoint"
VERSION: Final = 1
DELTA_VERSION: Final = 2
"""Of a commit of which some bytes lie in earlier ones: who knows only version 1 would not find them."""
SPARSE_VERSION: Final = 3
"""Of a commit of which some elements lie beside their tensors: who passes them by takes older ones for them."""
BOXED_VERSION: Final = 4
"""Of a commit with tensors in boxes that are not rows: who puts them one after the other mixes their elements up."""
DIGEST: Final = "xxh3_128"
CHUNK_BYTES: Final = 8 << 20
LARGEST: Final = 256 << 20
"""Bytes of a manifest: ten times what a thousand ranks with ten terabytes need."""
_KNOWN: Final = (VERSION, DELTA_VERSION, SPARSE_VERSION, BOXED_VERSION)
_SEAL: Final = "manifestDigest"
_SEAL_BYTES: Final = len(f',"{_SEAL}":"{"0" * 32}"}}\n')
_BEGINNING: Final = b'{"attempt":'
_MOST_UNSEALED: Final = 1 << 20
"""Bytes of what is parsed without a seal, to see whose it is: lists in lists take fifty times as much memory."""
_TENSORS: Final = "tensors"
_MOST: Final = 1 << 62  # of any number of bytes, so that no sum or product of a few leaves what torch can count
_MOST_DIMENSIONS: Final = 64
MOST_PATCHED: Final = 1 << 32  # elements of a box: places are numbers of 32 bits
PLACE: Final = "U32"
FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes of tensors that may be patched."""
PLACES: Final = "~places"
VALUES: Final = "~values"
"""What the names of a patch in a file end with: of tensors, no name has a `~` before another letter than 0 and 1."""


def whole_number(value: Any) -> int:
    """A number of bytes, or the like, exactly as JSON has it; ValueError for anything else."""
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"{str(value)[:40]!r} is no such number")
    return value


def whole_numbers(value: Any) -> tuple[int, ...]:
    """A shape, or the like; ValueError for anything else, or if the product were too large to count."""
    product = 1
    for number in _listed(value)[:_MOST_DIMENSIONS]:
        product *= whole_number(number) or 1
    if len(value) > _MOST_DIMENSIONS or product > _MOST:
        raise ValueError(f"{str(value)[:40]} is too large")
    return tuple(value)


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("not a list")  # a string would be one of its letters
    return value


def _bound(value: Any) -> float:
    if type(value) is not float or not 0 < value <= LARGEST_THRESHOLD:
        raise ValueError(f"{str(value)[:40]!r} bounds nothing")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a string")
    return value


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file of the commit: its length, its digest, and the digest of each 8 MiB of it."""

    nbytes: int
    digest: str
    chunks: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Wire form."""
        return {"bytes": self.nbytes, "digest": self.digest, "chunks": list(self.chunks)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FileRecord:
        """Read the wire form."""
        return cls(
            nbytes=whole_number(value["bytes"]),
            digest=_text(value["digest"]),
            chunks=tuple(map(_text, _listed(value["chunks"]))),
        )


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Where a box of a tensor lies: `start` and `shape` within the tensor, `offset` within the file."""

    file: str
    offset: int
    nbytes: int
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Wire form."""
        return {
            "file": self.file,
            "offset": self.offset,
            "bytes": self.nbytes,
            "start": list(self.start),
            "shape": list(self.shape),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Chunk:
        """Read the wire form."""
        return cls(
            file=_text(value["file"]),
            offset=whole_number(value["offset"]),
            nbytes=whole_number(value["bytes"]),
            start=whole_numbers(value["start"]),
            shape=whole_numbers(value["shape"]),
        )


@dataclass(frozen=True, kw_only=True)
class Patch:
    """Elements of a box of rows that are other than the chunks have them: `count` places in the box, and values, in a
    file. All others of the box differ from what was saved by at most `bound`."""

    file: str
    places: int
    values: int
    count: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    bound: float

    def to_json(self) -> dict[str, Any]:
        """Wire form."""
        return {**vars(self), "start": list(self.start), "shape": list(self.shape)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Patch:
        """Read the wire form."""
        return cls(
            file=_text(value["file"]),
            places=whole_number(value["places"]),
            values=whole_number(value["values"]),
            count=whole_number(value["count"]),
            start=whole_numbers(value["start"]),
            shape=whole_numbers(value["shape"]),
            bound=_bound(value["bound"]),
        )


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """A tensor's dtype, its global shape, the chunks that make it up, and what is other than these have it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    patches: tuple[Patch, ...] = ()

    @property
    def in_rows(self) -> bool:
        """Whether its chunks are whole rows, and so its bytes in order; else they are boxes of it."""
        return all(chunk.shape[1:] == self.shape[1:] for chunk in self.chunks)

    @property
    def bound(self) -> float | None:
        """By how much an element may differ from what was saved; None: by nothing."""
        return max((patch.bound for patch in self.patches), default=None)

    @property
    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Where its bytes lie: file, offset, and how many."""
        for chunk in self.chunks:
            yield chunk.file, chunk.offset, chunk.nbytes
        for patch in self.patches:
            yield patch.file, patch.places, patch.count * ITEM_BYTES[PLACE]
            yield patch.file, patch.values, patch.count * ITEM_BYTES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """Wire form."""
        patches = {"patches": [patch.to_json() for patch in self.patches]} if self.patches else {}
        chunks = [chunk.to_json() for chunk in self.chunks]
        return {"dtype": self.dtype, "shape": list(self.shape), "chunks": chunks, **patches}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TensorRecord:
        """Read the wire form."""
        return cls(
            dtype=_text(value["dtype"]),
            shape=whole_numbers(value["shape"]),
            chunks=tuple(Chunk.from_json(chunk) for chunk in _listed(value["chunks"])),
            patches=tuple(Patch.from_json(patch) for patch in _listed(value.get("patches", []))),
        )


class Records(dict[str, TensorRecord]):
    """Tensors' records, never changed: those of one commit are mostly those of the next, and their text is made once,
    and once it is seen that they fit their files."""

    fit: Mapping[str, int] | None = None
    """Bytes of the files of tensors that they were checked against."""

    @cached_property
    def boxed(self) -> bool:
        """Whether one of them is not in rows."""
        return not all(record.in_rows for record in self.values())

    @cached_property
    def text(self) -> str:
        """As the manifest has them."""
        return _text_of({name: record.to_json() for name, record in self.items()})


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One commit. `state` and `data` are JSON trees whose meaning belongs to others."""

    step: int
    pair: AttemptId
    job_uid: str
    publication: str
    run_id: str
    created: str
    world_size: int
    mesh: Mapping[str, int]
    tensors: Mapping[str, TensorRecord]
    files: Mapping[str, FileRecord]
    state: Any
    data: Any
    numerics: Mapping[str, Any]
    parent: str | None = None

    @property
    def objects(self) -> Mapping[str, Any]:
        """The trees of the saved objects, by name."""
        objects: Mapping[str, Any] = self.state.get("objects", {})
        return objects

    @property
    def own(self) -> Mapping[str, FileRecord]:
        """The files in the commit's own folder."""
        return {file: record for file, record in self.files.items() if inherited(file) is None}

    @property
    def stands_on(self) -> frozenset[str]:
        """The earlier commits that hold bytes of this one."""
        return frozenset(str(home) for home in map(inherited, self.files) if home is not None)

    @property
    def bounds(self) -> Mapping[str, float]:
        """Of the tensors that are not exactly what was saved, by how much an element may differ."""
        return {name: one.bound for name, one in self.tensors.items() if one.bound is not None}

    @property
    def version(self) -> int:
        """Of the format that it takes to say this."""
        if (self.tensors if isinstance(self.tensors, Records) else Records(self.tensors)).boxed:
            return BOXED_VERSION
        if any(one.patches for one in self.tensors.values()):
            return SPARSE_VERSION
        return DELTA_VERSION if self.stands_on else VERSION

    def head(self) -> dict[str, Any]:
        """Everything but the tensors and the seal."""
        return {
            "format": FORMAT,
            "version": self.version,
            "step": self.step,
            **self.pair.to_json(),
            "jobUID": self.job_uid,
            "publication": self.publication,
            "runID": self.run_id,
            "created": self.created,
            "world": {"size": self.world_size, "mesh": dict(self.mesh)},
            "files": {name: record.to_json() for name, record in self.files.items()},
            "digest": {"algorithm": DIGEST, "chunkBytes": CHUNK_BYTES},
            "state": self.state,
            "data": self.data,
            "numerics": dict(self.numerics),
            "parent": self.parent,
        }


def encode(manifest: Manifest) -> bytes:
    """The bytes of `MANIFEST.json`."""
    tensors = manifest.tensors if isinstance(manifest.tensors, Records) else Records(manifest.tensors)
    return _sealed({name: _text_of(value) for name, value in manifest.head().items()} | {_TENSORS: tensors.text})


def digest(manifest: Manifest) -> str:
    """Of those bytes; it stands for all that the commit holds."""
    return xxhash.xxh3_128_hexdigest(encode(manifest))


@uncollected()
def decode(raw: bytes) -> Manifest:
    """Read `MANIFEST.json`; DamagedError if it is not what was written, UnknownFormatError if others wrote it."""
    if len(raw) > _MOST_UNSEALED and not _is_sealed(raw):
        raise _unsealed(raw)
    document = _parse(raw)
    seal = document.pop(_SEAL, None)
    if document.get("format") != FORMAT and seal is None:
        raise UnknownFormatError("MANIFEST.json was written by another program")
    texts = _texts(document)
    if _sealed(texts) != raw:
        raise DamagedError("MANIFEST.json: its own digest differs")
    version, digest = document.get("version"), document.get("digest")
    known = type(version) is int and version in _KNOWN
    if document.get("format") != FORMAT or not known or digest != _digest_in_use():
        raise UnknownFormatError(
            f"MANIFEST.json is of format {document.get('format')!r}, version {version!r}, digest {digest!r}; "
            f"this release reads {FORMAT!r}, versions {VERSION} to {BOXED_VERSION}, "
            f"digest {_digest_in_use()!r}: use a newer holdfast"
        )
    manifest = _read(document, texts)
    check(manifest)
    if manifest.version != version:
        raise DamagedError(f"MANIFEST.json is of version {version}, and says what version {manifest.version} is for")
    return manifest


def _is_sealed(raw: bytes) -> bool:
    """Whether it ends with the digest of what is before, as of the bytes: nothing is parsed for it."""
    body, end = memoryview(raw)[:-_SEAL_BYTES], raw[-_SEAL_BYTES:]
    digest = xxhash.xxh3_128(body)
    digest.update(b"}")
    return end == _seal(digest.hexdigest())


def _unsealed(raw: bytes) -> DamagedError | UnknownFormatError:
    """What a large file without a seal is. Ours begins as no other does and names itself; a damaged one keeps one of
    both, or is no JSON object."""
    ours = raw.startswith(_BEGINNING) or FORMAT.encode() in raw or _SEAL.encode() in raw
    if not ours and raw[:1] == b"{" and raw[-64:].rstrip()[-1:] == b"}":
        return UnknownFormatError("MANIFEST.json was written by another program")
    return DamagedError("MANIFEST.json: its own digest differs")


def _seal(digest: str) -> bytes:
    return f',"{_SEAL}":"{digest}"}}\n'.encode()


def _digest_in_use() -> dict[str, Any]:
    return {"algorithm": DIGEST, "chunkBytes": CHUNK_BYTES}


def _text_of(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _sealed(texts: Mapping[str, str]) -> bytes:
    body = ("{" + ",".join(f"{_text_of(name)}:{text}" for name, text in sorted(texts.items()))).encode()
    return body + _seal(xxhash.xxh3_128_hexdigest(body + b"}"))


def _texts(document: Mapping[str, Any]) -> dict[str, str]:
    try:
        return {name: _text_of(value) for name, value in document.items()}
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"MANIFEST.json holds what no manifest does: {error}") from error


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"MANIFEST.json is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise DamagedError("MANIFEST.json is not a JSON object")
    return document


def _read(document: Mapping[str, Any], texts: Mapping[str, str]) -> Manifest:
    try:
        tensors = Records((name, TensorRecord.from_json(value)) for name, value in document[_TENSORS].items())
        tensors.text = texts[_TENSORS]
        return Manifest(
            step=whole_number(document["step"]),
            pair=AttemptId(whole_number(document["generation"]), whole_number(document["attempt"])),
            job_uid=_text(document["jobUID"]),
            publication=_text(document["publication"]),
            run_id=_text(document["runID"]),
            created=_text(document["created"]),
            world_size=whole_number(document["world"]["size"]),
            mesh={_text(name): whole_number(size) for name, size in document["world"]["mesh"].items()},
            tensors=tensors,
            files={name: FileRecord.from_json(value) for name, value in document["files"].items()},
            state=_with_objects(document["state"]),
            data=document["data"],
            numerics=dict(document["numerics"]),
            parent=_commit(document["parent"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"MANIFEST.json lacks what version {document['version']} must have: {error!r}") from error


def _with_objects(state: Any) -> Any:
    if not isinstance(state.get("objects", {}), dict):
        raise TypeError("its objects are no JSON object")
    return state


def _commit(value: Any) -> str | None:
    name = None if value is None else parse_commit(_text(value))
    if value is not None and (name is None or name.staging or str(name) != value):
        raise ValueError("its parent is no commit's name")
    return None if name is None else str(name)


def check(manifest: Manifest) -> None:
    """Every tensor is covered, each of its bytes once, by files of this folder, or of earlier commits' if it has a
    parent; else DamagedError."""
    for name, record in manifest.files.items():
        if not is_shard(name) and not _earlier(manifest, name):
            raise DamagedError(f"MANIFEST.json names a file that no commit has: {name!r}")
        if is_shard(name) and shard_rank(name) >= manifest.world_size:
            raise DamagedError(f"MANIFEST.json: {name} is of no rank of a world of {manifest.world_size}")
        if len(record.chunks) != -(-record.nbytes // CHUNK_BYTES):
            raise DamagedError(f"MANIFEST.json: {name} has {record.nbytes} bytes and {len(record.chunks)} digests")
    _check_tensors(manifest.tensors, manifest.files)


def _check_tensors(tensors: Mapping[str, TensorRecord], files: Mapping[str, FileRecord]) -> None:
    sizes = {name: record.nbytes for name, record in files.items() if name.endswith(".safetensors")}
    known = tensors if isinstance(tensors, Records) else Records()
    if known.fit == sizes:
        return
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, files)
    _check_apart(tensors.values())
    known.fit = sizes


def _earlier(manifest: Manifest, file: str) -> bool:
    """Whether it may lie in another commit: one that was there before, in a file of tensors."""
    home = inherited(file)
    before = home is not None and home.step < manifest.step and file.endswith(".safetensors")
    return before and manifest.parent is not None


def _check_apart(tensors: Iterable[TensorRecord]) -> None:
    """No byte belongs to two tensors: a small file must not fill the memory again and again."""
    spans = (span for tensor in tensors for span in tensor.spans if span[2])
    ends: dict[str, int] = {}
    for file, offset, nbytes in sorted(spans):
        if offset < ends.get(file, 0):
            raise DamagedError(f"MANIFEST.json: two tensors share bytes of {file}")
        ends[file] = offset + nbytes


def _check_tensor(name: str, tensor: TensorRecord, files: Mapping[str, FileRecord]) -> None:
    if tensor.dtype not in ITEM_BYTES:
        raise DamagedError(f"MANIFEST.json: tensor {name} has an unknown dtype {tensor.dtype!r}")
    if not (all(_fits(tensor.dtype, chunk, files) for chunk in tensor.chunks) and _made_up(tensor)):
        raise DamagedError(f"MANIFEST.json: the chunks of tensor {name} do not make it up")
    _check_patches(name, tensor, files)


def _fits(dtype: str, chunk: Chunk, files: Mapping[str, FileRecord]) -> bool:
    """Whether it lies in its file, and is as long as what it holds."""
    within = chunk.file in files and 0 <= chunk.offset <= chunk.offset + chunk.nbytes <= files[chunk.file].nbytes
    return within and ITEM_BYTES[dtype] * math.prod(chunk.shape) == chunk.nbytes


def _made_up(tensor: TensorRecord) -> bool:
    if not tensor.in_rows:
        return not tensor.patches and tiles(tensor.shape, ((chunk.start, chunk.shape) for chunk in tensor.chunks))
    rows = 0
    for chunk in sorted(tensor.chunks, key=lambda chunk: chunk.start):
        if len(chunk.shape) != len(tensor.shape) or chunk.start != (
            (rows, *(0 for _ in tensor.shape[1:])) if tensor.shape else ()
        ):
            return False
        rows += chunk.shape[0] if chunk.shape else 1
    return rows == (tensor.shape[0] if tensor.shape else 1)


def _check_patches(name: str, tensor: TensorRecord, files: Mapping[str, FileRecord]) -> None:
    """Each is of rows of its own, and lies in the commit's own files: a commit stands on chunks, never on patches."""
    row, free = math.prod(tensor.shape[1:]), 0
    for patch in sorted(tensor.patches, key=lambda patch: patch.start):
        if tensor.dtype not in FLOATS or not _is_rows(patch, tensor) or patch.start[0] < free:
            raise DamagedError(f"MANIFEST.json: a patch of tensor {name} is of no rows of it")
        free = patch.start[0] + patch.shape[0]
        if not patch.count <= patch.shape[0] * row <= MOST_PATCHED:
            raise DamagedError(f"MANIFEST.json: a patch of tensor {name} has {patch.count} elements")
        ends = patch.places + patch.count * ITEM_BYTES[PLACE], patch.values + patch.count * ITEM_BYTES[tensor.dtype]
        here = is_shard(patch.file) and patch.file.endswith(".safetensors") and patch.file in files
        if not here or max(ends) > files[patch.file].nbytes:
            raise DamagedError(f"MANIFEST.json: a patch of tensor {name} lies in no file of the commit")


def _is_rows(patch: Patch, tensor: TensorRecord) -> bool:
    if not len(patch.start) == len(patch.shape) == len(tensor.shape) > 0:
        return False
    whole = patch.shape[1:] == tensor.shape[1:] and not any(patch.start[1:])
    return whole and patch.start[0] + patch.shape[0] <= tensor.shape[0]
