"""A manifest is exactly what was written, or corrupt. Foreign and newer formats do not count as corrupt."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest
import xxhash

from holdfast.checkpoint.format.coverage import check
from holdfast.checkpoint.format.manifest import Manifest, decode, encode
from holdfast.checkpoint.format.records import CHUNK_BYTES, Chunk, FileRecord, Records, TensorRecord
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import CorruptCheckpointError, UnknownFormatError

FILE = FileRecord(nbytes=4096 + 24, digest="d" * 32, chunks=("c" * 32,))
CHUNK = Chunk(file="rank-0.safetensors", offset=4096, nbytes=24, start=(0, 0), shape=(2, 3))
MANIFEST = Manifest(
    step=7,
    attempt_id=AttemptId(2, 1),
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


@pytest.mark.parametrize("kind", [dict, Records])
def test_bytes_are_canonical_json_for_any_record_storage(
    kind: Callable[..., dict[str, TensorRecord]],
) -> None:
    records = kind({"w": MANIFEST.tensors["w"], "ü/0": TensorRecord(dtype="F32", shape=(0,), chunks=())})
    for step in (7, 8):  # the second is encoded from the cache of the first
        raw = encode(replace(MANIFEST, step=step, tensors=records))
        document = json.loads(raw)
        del document["manifestDigest"]
        assert raw == sealed(document)
        assert decode(raw) == replace(MANIFEST, step=step, tensors=dict(records))
        assert encode(decode(raw)) == raw
        assert encode(replace(decode(raw), tensors=dict(records))) == raw  # not only from the cached text


def test_records_are_checked_again_when_a_file_is_shorter() -> None:
    manifest = replace(MANIFEST, tensors=Records(MANIFEST.tensors))
    for _ in range(2):
        check(manifest)
    with pytest.raises(CorruptCheckpointError, match="do not cover it exactly"):
        check(replace(manifest, files={"rank-0.safetensors": replace(FILE, nbytes=4096)}))
    with pytest.raises(CorruptCheckpointError, match="do not cover it exactly"):
        check(replace(manifest, files={}))


def test_a_flip_of_any_bit_of_any_byte_is_damage() -> None:
    raw = encode(MANIFEST)
    for place in range(len(raw)):
        for bit in (0, 3, 7):
            bad = bytearray(raw)
            bad[place] ^= 1 << bit
            with pytest.raises(CorruptCheckpointError):
                decode(bytes(bad))


def test_a_truncation_anywhere_is_damage() -> None:
    raw = encode(MANIFEST)
    for length in range(len(raw)):
        with pytest.raises(CorruptCheckpointError):
            decode(raw[:length])


def test_a_whole_manifest_of_a_newer_version_is_refused_by_name() -> None:
    document = json.loads(encode(MANIFEST))
    del document["manifestDigest"]
    with pytest.raises(UnknownFormatError, match=r"version 5.*reads .* versions 1 to 4.*use a newer holdfast"):
        decode(sealed({**document, "version": 5, "novelty": True}))


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
    with pytest.raises(CorruptCheckpointError, match="cannot be part of a checkpoint"):
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
    with pytest.raises(CorruptCheckpointError, match="do not cover it exactly"):
        check(replace(MANIFEST, tensors={"w": TensorRecord(dtype="F32", shape=(2, 3), chunks=chunks)}))


def test_a_file_needs_a_digest_for_each_8_mib() -> None:
    with pytest.raises(CorruptCheckpointError, match="1 digests"):
        check(replace(MANIFEST, tensors={}, files={"rank-0.json": replace(FILE, nbytes=CHUNK_BYTES + 1)}))


# Deltas

EARLIER = "step-5.g2.a1/rank-0.safetensors"
DELTA = replace(
    MANIFEST,
    parent="step-6.g2.a1",
    files={**MANIFEST.files, EARLIER: FILE},
    tensors={
        "w": TensorRecord(
            dtype="F32",
            shape=(2, 3),
            chunks=(
                replace(CHUNK, nbytes=12, shape=(1, 3)),
                replace(CHUNK, nbytes=12, shape=(1, 3), start=(1, 0), file=EARLIER),
            ),
        )
    },
)


def test_only_a_delta_has_a_version_that_older_readers_refuse() -> None:
    assert json.loads(encode(DELTA))["version"] == 2
    assert json.loads(encode(MANIFEST))["version"] == 1
    assert json.loads(encode(replace(MANIFEST, parent="step-6.g2.a1")))["version"] == 1
    assert decode(encode(DELTA)) == DELTA
    assert DELTA.depends_on == {"step-5.g2.a1"}
    assert DELTA.own == MANIFEST.files


@pytest.mark.parametrize(
    "name",
    [
        "step-7.g2.a1/rank-0.safetensors",
        "step-8.g2.a1/rank-0.safetensors",
        "step-5.g2.a1/rank-0.json",
        "step-05.g2.a1/rank-0.safetensors",
        "step-5.g2.a1/../rank-0.safetensors",
        "step-5.g2.a1//rank-0.safetensors",
        f"step-5.g2.a1.tmp-{'0' * 32}/rank-0.safetensors",
        "../step-5.g2.a1/rank-0.safetensors",
        "/step-5.g2.a1/rank-0.safetensors",
        "quarantine/rank-0.safetensors",
    ],
)
def test_a_delta_names_files_of_earlier_commits_only(name: str) -> None:
    with pytest.raises(CorruptCheckpointError, match="cannot be part of a checkpoint"):
        check(replace(DELTA, files={**MANIFEST.files, EARLIER: FILE, name: FILE}))


def test_a_delta_names_its_parent() -> None:
    with pytest.raises(CorruptCheckpointError, match="cannot be part of a checkpoint"):
        check(replace(DELTA, parent=None))


@pytest.mark.parametrize(("manifest", "version"), [(DELTA, 1), (MANIFEST, 2)])
def test_version_that_contradicts_the_manifest_is_corruption(manifest: Manifest, version: int) -> None:
    document = json.loads(encode(manifest))
    del document["manifestDigest"]
    with pytest.raises(CorruptCheckpointError, match=f"has version {version}"):
        decode(sealed({**document, "version": version}))


@pytest.mark.parametrize(
    ("begin", "end", "error"),
    [
        (b'{"attempt":1,"x":[', b"]}", CorruptCheckpointError),
        (b'{"x":[', b'],"manifestDigest":"00000000000000000000000000000000"}\n', CorruptCheckpointError),
        (b"[", b"]", CorruptCheckpointError),
        (b'{"tape":[', b"]}\n", UnknownFormatError),
    ],
)
def test_large_manifest_without_a_valid_seal_takes_no_memory(
    begin: bytes, end: bytes, error: type[Exception]
) -> None:
    """The manifest is refused before it is parsed."""
    raw = begin + b"[]," * (8 << 20) + b"[]" + end
    tracemalloc.start()
    try:
        with pytest.raises(error):
            decode(raw)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_large_sealed_manifest_is_read_and_a_flipped_bit_found() -> None:
    large = replace(MANIFEST, state={"objects": {"notes": "x" * (2 << 20)}})
    raw = encode(large)
    assert decode(raw) == large
    for place in (0, len(raw) // 2, len(raw) - 20):
        bad = bytearray(raw)
        bad[place] ^= 1
        with pytest.raises(CorruptCheckpointError):
            decode(bytes(bad))
    with pytest.raises(CorruptCheckpointError):
        decode(raw[: len(raw) // 2])
