"""A manifest is exactly what was written, or damaged; another program's or a newer one is told from a damaged one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import xxhash

from holdfast.checkpoint.manifest import (
    CHUNK_BYTES,
    Chunk,
    FileRecord,
    Manifest,
    TensorRecord,
    check,
    decode,
    encode,
)
from holdfast.errors import DamagedError, UnknownFormatError
from holdfast.worlds import Pair

FILE = FileRecord(nbytes=4096 + 24, digest="d" * 32, chunks=("c" * 32,))
CHUNK = Chunk(file="rank-0.safetensors", offset=4096, nbytes=24, start=(0, 0), shape=(2, 3))
MANIFEST = Manifest(
    step=7,
    pair=Pair(2, 1),
    job_uid="job-1",
    publication="p2",
    run_id="run",
    created="2026-01-31T12:00:00.000000Z",
    world_size=1,
    mesh={"data": 1},
    tensors={"w": TensorRecord(dtype="F32", shape=(2, 3), chunks=(CHUNK,))},
    files={"rank-0.safetensors": FILE},
    state={"objects": {"lr": 0.1, "big": 2**80, "é": None}, "counters": {}},
    data={"cursor": 5},
    numerics={"torch": "2.13"},
)


def sealed(document: dict[str, object]) -> bytes:
    body = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return body[:-1] + f',"manifestDigest":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()


def test_what_is_read_is_what_was_written() -> None:
    assert decode(encode(MANIFEST)) == MANIFEST


def test_a_flip_of_any_bit_of_any_byte_is_damage() -> None:
    raw = encode(MANIFEST)
    for place in range(len(raw)):
        for bit in (0, 3, 7):
            bad = bytearray(raw)
            bad[place] ^= 1 << bit
            with pytest.raises(DamagedError):
                decode(bytes(bad))


def test_a_truncation_anywhere_is_damage() -> None:
    raw = encode(MANIFEST)
    for length in range(len(raw)):
        with pytest.raises(DamagedError):
            decode(raw[:length])


def test_a_whole_manifest_of_a_newer_version_is_refused_by_name() -> None:
    document = json.loads(encode(MANIFEST))
    del document["manifestDigest"]
    with pytest.raises(UnknownFormatError, match=r"version 2.*use a newer holdfast"):
        decode(sealed({**document, "version": 2, "novelty": True}))


def test_another_digest_than_ours_is_refused_by_name() -> None:
    document = json.loads(encode(MANIFEST))
    del document["manifestDigest"]
    with pytest.raises(UnknownFormatError, match="sha256"):
        decode(sealed({**document, "digest": {"algorithm": "sha256", "chunkBytes": 1}}))


def test_another_programs_manifest_is_refused_by_name() -> None:
    with pytest.raises(UnknownFormatError, match="another program"):
        decode(b'{"format": "tape", "files": []}')


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "rank-0.pt", "rank-0.safetensors/x", "/rank-0.json", "rank-.json"]
)
def test_a_manifest_cannot_point_out_of_its_folder(name: str) -> None:
    with pytest.raises(DamagedError, match="no commit has"):
        check(replace(MANIFEST, files={name: FILE}))


@pytest.mark.parametrize(
    "chunks",
    [
        (),
        (replace(CHUNK, shape=(1, 3), nbytes=12),),
        (CHUNK, CHUNK),
        (replace(CHUNK, start=(1, 0)),),
        (replace(CHUNK, offset=4100),),
        (replace(CHUNK, offset=-24),),
        (replace(CHUNK, file="rank-9.safetensors"),),
        (replace(CHUNK, nbytes=23),),
    ],
)
def test_chunks_that_do_not_make_up_their_tensor_are_damage(chunks: tuple[Chunk, ...]) -> None:
    with pytest.raises(DamagedError, match="do not make it up"):
        check(replace(MANIFEST, tensors={"w": TensorRecord(dtype="F32", shape=(2, 3), chunks=chunks)}))


def test_a_file_needs_a_digest_for_each_8_mib() -> None:
    with pytest.raises(DamagedError, match="1 digests"):
        check(replace(MANIFEST, tensors={}, files={"rank-0.json": replace(FILE, nbytes=CHUNK_BYTES + 1)}))
