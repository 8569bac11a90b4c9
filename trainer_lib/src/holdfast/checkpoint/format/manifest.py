"""`MANIFEST.json`: the contents of a checkpoint, and the digest of every byte of it. Pure.

The file is canonical JSON (sorted keys, no spaces) and ends with its own digest. A manifest is therefore either
exactly what was written, or corrupt. Later versions keep this envelope, so that a valid manifest of an unknown
version can be distinguished from a corrupt one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import xxhash

from holdfast.checkpoint.format.coverage import check
from holdfast.checkpoint.format.file_names import CheckpointName, inherited, parse_commit
from holdfast.checkpoint.format.records import (
    CHUNK_BYTES,
    FileRecord,
    Records,
    TensorRecord,
    canonical,
    string,
    whole_number,
)
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import CorruptCheckpointError, UnknownFormatError
from holdfast.core.interpreter import uncollected

FORMAT: Final = "holdfast-checkpoint"
VERSION: Final = 1
DELTA_VERSION: Final = 2
"""Version of a checkpoint that has bytes in earlier checkpoints. A reader of version 1 would not find them."""
SPARSE_VERSION: Final = 3
"""Version of a checkpoint with patches. A reader that skips patches would load older values."""
BOXED_VERSION: Final = 4
"""Version of a checkpoint with boxes that are not rows. A reader that concatenates them would mix elements up."""
DIGEST: Final = "xxh3_128"

LARGEST: Final = 256 << 20
"""The largest size of a manifest, in bytes: ten times what a thousand ranks with ten terabytes need."""
_KNOWN: Final = (VERSION, DELTA_VERSION, SPARSE_VERSION, BOXED_VERSION)
_SEAL: Final = "manifestDigest"
_SEAL_BYTES: Final = len(f',"{_SEAL}":"{"0" * 32}"}}\n')
_BEGINNING: Final = b'{"attempt":'
_MOST_UNSEALED: Final = 1 << 20
"""The largest file without a seal that is parsed to identify its writer, in bytes.

Nested lists need fifty times as much memory as their text.
"""
_TENSORS: Final = "tensors"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One checkpoint. `state` and `data` are JSON trees, which other modules interpret."""

    step: int
    attempt_id: AttemptId
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
    def name(self) -> CheckpointName:
        return CheckpointName(step=self.step, attempt_id=self.attempt_id)

    @property
    def objects(self) -> Mapping[str, Any]:
        objects: Mapping[str, Any] = self.state.get("objects", {})
        return objects

    @property
    def own(self) -> Mapping[str, FileRecord]:
        return {file: record for file, record in self.files.items() if inherited(file) is None}

    @property
    def depends_on(self) -> frozenset[str]:
        """The earlier checkpoints that hold bytes of this one."""
        return frozenset(str(home) for home in map(inherited, self.files) if home is not None)

    @property
    def bounds(self) -> Mapping[str, float]:
        """For each tensor that is not exactly what was saved, the largest difference of an element."""
        return {name: one.bound for name, one in self.tensors.items() if one.bound is not None}

    @property
    def version(self) -> int:
        """The oldest version of the format that can describe this manifest."""
        if (self.tensors if isinstance(self.tensors, Records) else Records(self.tensors)).boxed:
            return BOXED_VERSION
        if any(one.patches for one in self.tensors.values()):
            return SPARSE_VERSION
        return DELTA_VERSION if self.depends_on else VERSION

    def head(self) -> dict[str, Any]:
        """Return all fields except the tensors and the seal."""
        return {
            "format": FORMAT,
            "version": self.version,
            "step": self.step,
            **self.attempt_id.to_json(),
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


def stamp(moment: datetime | None = None) -> str:
    """Format a time as in `created`. The default is the current time."""
    return (moment or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def encode(manifest: Manifest) -> bytes:
    tensors = manifest.tensors if isinstance(manifest.tensors, Records) else Records(manifest.tensors)
    return _sealed({name: canonical(value) for name, value in manifest.head().items()} | {_TENSORS: tensors.text})


def digest(manifest: Manifest) -> str:
    """Return the digest of the encoded manifest, which identifies everything that the checkpoint contains."""
    return xxhash.xxh3_128_hexdigest(encode(manifest))


def decode_as(raw: bytes, name: CheckpointName) -> Manifest:
    """Parse the manifest of the checkpoint `name`. Raise `CorruptCheckpointError` if it is another's."""
    manifest = decode(raw)
    if manifest.name != name:
        raise CorruptCheckpointError(f"MANIFEST.json belongs to step {manifest.step}, attempt {manifest.attempt_id}")
    return manifest


@uncollected()
def decode(raw: bytes) -> Manifest:
    """Parse `MANIFEST.json`.

    Raise `CorruptCheckpointError` if it was changed, and `UnknownFormatError` if another program wrote it.
    """
    if len(raw) > _MOST_UNSEALED and not _is_sealed(raw):
        raise _unsealed(raw)
    document = _parse(raw)
    seal = document.pop(_SEAL, None)
    if document.get("format") != FORMAT and seal is None:
        raise UnknownFormatError("MANIFEST.json was written by another program")
    texts = _texts(document)
    if _sealed(texts) != raw:
        raise CorruptCheckpointError("MANIFEST.json: its own digest does not match")
    version, digest = document.get("version"), document.get("digest")
    known = type(version) is int and version in _KNOWN
    if document.get("format") != FORMAT or not known or digest != _digest_in_use():
        raise UnknownFormatError(
            f"MANIFEST.json has format {document.get('format')!r}, version {version!r}, digest {digest!r}; "
            f"this release reads {FORMAT!r}, versions {VERSION} to {BOXED_VERSION}, digest "
            f"{_digest_in_use()!r}: use a newer holdfast"
        )
    manifest = _read(document, texts)
    check(manifest)
    if manifest.version != version:
        raise CorruptCheckpointError(
            f"MANIFEST.json has version {version}, but contains fields of version {manifest.version}"
        )
    return manifest


def _is_sealed(raw: bytes) -> bool:
    """Return whether the bytes end with the digest of what precedes it. Nothing is parsed."""
    body, end = memoryview(raw)[:-_SEAL_BYTES], raw[-_SEAL_BYTES:]
    digest = xxhash.xxh3_128(body)
    digest.update(b"}")
    return end == _seal(digest.hexdigest())


def _unsealed(raw: bytes) -> CorruptCheckpointError | UnknownFormatError:
    """Return the error for a large file without a seal.

    A manifest has an unusual beginning and names its own format. A corrupt one keeps at least one of both, or is not
    a JSON object.
    """
    ours = raw.startswith(_BEGINNING) or FORMAT.encode() in raw or _SEAL.encode() in raw
    if not ours and raw[:1] == b"{" and raw[-64:].rstrip()[-1:] == b"}":
        return UnknownFormatError("MANIFEST.json was written by another program")
    return CorruptCheckpointError("MANIFEST.json: its own digest does not match")


def _seal(digest: str) -> bytes:
    return f',"{_SEAL}":"{digest}"}}\n'.encode()


def _digest_in_use() -> dict[str, Any]:
    return {"algorithm": DIGEST, "chunkBytes": CHUNK_BYTES}


def _sealed(texts: Mapping[str, str]) -> bytes:
    body = ("{" + ",".join(f"{canonical(name)}:{text}" for name, text in sorted(texts.items()))).encode()
    return body + _seal(xxhash.xxh3_128_hexdigest(body + b"}"))


def _texts(document: Mapping[str, Any]) -> dict[str, str]:
    try:
        return {name: canonical(value) for name, value in document.items()}
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"MANIFEST.json is not valid: {error}") from error


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"MANIFEST.json is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CorruptCheckpointError("MANIFEST.json is not a JSON object")
    return document


def _read(document: Mapping[str, Any], texts: Mapping[str, str]) -> Manifest:
    try:
        tensors = Records((name, TensorRecord.from_json(value)) for name, value in document[_TENSORS].items())
        tensors.text = texts[_TENSORS]
        return Manifest(
            step=whole_number(document["step"]),
            attempt_id=AttemptId(whole_number(document["generation"]), whole_number(document["attempt"])),
            job_uid=string(document["jobUID"]),
            publication=string(document["publication"]),
            run_id=string(document["runID"]),
            created=string(document["created"]),
            world_size=whole_number(document["world"]["size"]),
            mesh={string(name): whole_number(size) for name, size in document["world"]["mesh"].items()},
            tensors=tensors,
            files={name: FileRecord.from_json(value) for name, value in document["files"].items()},
            state=_with_objects(document["state"]),
            data=document["data"],
            numerics=dict(document["numerics"]),
            parent=_commit(document["parent"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"MANIFEST.json lacks what version {document['version']} must have: {error!r}"
        ) from error


def _with_objects(state: Any) -> Any:
    if not isinstance(state.get("objects", {}), dict):
        raise TypeError("its objects are not a JSON object")
    return state


def _commit(value: Any) -> str | None:
    name = None if value is None else parse_commit(string(value))
    if value is not None and (name is None or name.staging or str(name) != value):
        raise ValueError("its parent is not the name of a checkpoint")
    return None if name is None else str(name)
