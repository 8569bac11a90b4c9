"""Malicious manifests with a valid seal count as corrupt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from forged_commits import (
    NEWEST,
    TENSORS,
    Json,
    falls_back,
    forge,
    setter,
    verdict,
)
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from holdfast import HoldfastError
from holdfast.checkpoint.dcp import reader, writer
from holdfast.checkpoint.format.manifest import LARGEST
from holdfast.checkpoint.format.records import CHUNK_BYTES
from holdfast.core.errors import CorruptCheckpointError

WEIGHT = "tensors|model/weight"


FORGERIES: list[tuple[str, Json, str]] = [
    ("files", {}, "do not cover it exactly"),
    (
        "files|../../../etc/passwd",
        {"bytes": 1, "digest": "", "chunks": [""]},
        "names a file that cannot be part",
    ),
    (
        "files|/etc/passwd",
        {"bytes": 1, "digest": "", "chunks": [""]},
        "names a file that cannot be part",
    ),
    (
        "files|rank-0.pt",
        {"bytes": 1, "digest": "", "chunks": [""]},
        "names a file that cannot be part",
    ),
    (
        "files|rank-00.json",
        {"bytes": 1, "digest": "", "chunks": [""]},
        "names a file that cannot be part",
    ),
    ("files|rank-7.json", {"bytes": 0, "digest": "", "chunks": []}, "belongs to no rank of a world of 1"),
    (f"files|{TENSORS}|bytes", 10 * 2**30, "digests"),
    (f"files|{TENSORS}|bytes", -1, "not a valid number"),
    (f"files|{TENSORS}|bytes", 10**30, "not a valid number"),
    (f"files|{TENSORS}|bytes", 4096.0, "not a valid number"),
    (f"files|{TENSORS}|chunks", "x", "not a list"),
    (f"{WEIGHT}|chunks|0|file", "../step-10.g0.a1/rank-0.safetensors", "do not cover it exactly"),
    (f"{WEIGHT}|chunks|0|offset", -8, "not a valid number"),
    (f"{WEIGHT}|chunks|0|offset", 2**62, "do not cover it exactly"),
    (f"{WEIGHT}|chunks|0|offset", True, "not a valid number"),
    (f"{WEIGHT}|chunks|0|bytes", 2**40, "do not cover it exactly"),
    (f"{WEIGHT}|chunks", [], "do not cover it exactly"),
    (f"{WEIGHT}|dtype", "F64", "do not cover it exactly"),
    (f"{WEIGHT}|dtype", "PICKLE", "unknown dtype"),
    (f"{WEIGHT}|dtype", ["F32"], "not a string"),
    (f"{WEIGHT}|shape", [2**40, 2**40], "too large"),
    (f"{WEIGHT}|shape", [0] * 65, "too large"),
    (f"{WEIGHT}|shape", "22", "not a list"),
    ("tensors", [], "lacks what version 1 must have"),
    ("step", 21, "belongs to step 21"),
    ("step", "20", "not a valid number"),
    ("generation", 9, "belongs to step 20, attempt 9.1"),
    ("generation", None, "not a valid number"),
    ("world", {"size": 1}, "lacks what version 1 must have"),
    ("world|size", 10**30, "not a valid number"),
    ("world|mesh", {"data": -1}, "not a valid number"),
    ("state", None, "lacks what version 1 must have"),
    ("state|objects", [], "lacks what version 1 must have"),
    ("parent", "../../tmp", "not the name of a checkpoint"),
    ("parent", "step-1.g1.a1.tmp-" + "0" * 32, "not the name of a checkpoint"),
    ("numerics", 5, "lacks what version 1 must have"),
]


@pytest.mark.parametrize(("path", "value", "why"), FORGERIES, ids=[f"{p}={str(v)[:20]}" for p, v, _ in FORGERIES])
def test_a_manifest_that_lies_is_damage(root: Path, path: str, value: Json, why: str) -> None:
    forge(root, setter(path, value))
    falls_back(root, why)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b'{"format":NaN,"manifestDigest":""}', "MANIFEST.json is not valid"),
        (b'{"format":"holdfast-checkpoint","step":1e999,"manifestDigest":""}', "MANIFEST.json is not valid"),
        (b'{"a":' * 100_000, "not JSON"),
        (b"[" * 50_000 + b"]" * 50_000, "MANIFEST.json"),
        (b'{"manifestDigest":"","step":1' + b"0" * 5000 + b"}", "not JSON"),
        (b'{"manifestDigest":"","manifestDigest":""}', "digest does not match"),
        (b'{"manifestDigest":{}}', "digest does not match"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"null", "not a JSON object"),
        (b"", "not JSON"),
    ],
)
def test_what_is_no_manifest_is_damage(root: Path, raw: bytes, why: str) -> None:
    (root / NEWEST / "MANIFEST.json").write_bytes(raw)
    falls_back(root, why)


def test_a_manifest_of_a_size_that_none_has_is_not_read(root: Path) -> None:
    with (root / NEWEST / "MANIFEST.json").open("wb") as file:
        file.truncate(LARGEST + 1)  # holes: the file uses no disk space
    falls_back(root, "more than the limit for this file")


def test_a_claim_of_10_gb_in_a_small_file_costs_no_memory(root: Path) -> None:
    size = 10 * 2**30

    def claim(document: Json) -> None:
        count = -(-size // CHUNK_BYTES)
        document["files"][TENSORS] |= {"bytes": size, "chunks": ["0" * 32] * count}
        chunk = document["tensors"]["model/weight"]["chunks"][0]
        chunk |= {"offset": 4096, "bytes": size - 4096, "start": [0], "shape": [size - 4096]}
        document["tensors"] = {"model/weight": {"dtype": "U8", "shape": [size - 4096], "chunks": [chunk]}}

    forge(root, claim)
    falls_back(root, f"bytes instead of {size}")


def test_small_file_claiming_many_tensors_does_not_fill_memory(root: Path) -> None:
    def claim(document: Json) -> None:
        tensor = document["tensors"]["model/weight"]
        document["tensors"] |= {f"copy-{i}": tensor for i in range(3)}

    forge(root, claim)
    falls_back(root, "two tensors share bytes")


# Content for torch.distributed.checkpoint


W = "state|dcp|tensors|w"


LIES: list[tuple[str, Json, str]] = [
    (f"{W}|boxes", [], "'w"),
    (f"{W}|boxes|0|offsets", [1, 0], "disagree about 'w'"),
    (f"{W}|boxes|0|sizes", [3, 3], "disagree about 'w'"),
    (f"{W}|boxes|0|sizes", [0, 3], "disagree about 'w'"),
    (f"{W}|boxes|0|tensor", "v", "disagree about 'w'"),
    (f"{W}|boxes|0|tensor", ["w"], "cannot be read"),
    (f"{W}|boxes|0", {}, "cannot be read"),
    (f"{W}|size", [3, 3], "disagree about 'w'"),
    (f"{W}|size", [-4, 3], "not a valid number"),
    (f"{W}|dtype", "I32", "disagree about 'w'"),
    (f"{W}|dtype", [], "disagree about 'w'"),
    ("state|dcp|tensors|x", {"dtype": "F32", "size": [4], "boxes": []}, "disagree about 'x'"),
    ("state|dcp|tensors|x", {"dtype": "NOPE", "size": [0], "boxes": []}, "disagree about 'x'"),
    ("state|dcp|tensors", {}, "does not describe the tensor 'v"),
    ("state|dcp|tensors", [], "cannot be read"),
    ("state|dcp|planner|w", 5, "cannot be read"),
    ("state|dcp|values", None, "cannot be read"),
    ("state|dcp", [], "cannot be read"),
]


@pytest.fixture(params=[False, True], ids=["whole", "apart"])
def through_dcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """Read boxes as stored now, and as in earlier releases, in which each box is a tensor."""
    with monkeypatch.context() as earlier:
        if request.param:
            earlier.setattr(writer, "tiles", lambda size, boxes: False)
        ones = {"v": torch.ones(4, 3), "w": torch.ones(4, 3)}
        dcp.save(ones, storage_writer=writer.StorageWriter(tmp_path, step=20), no_dist=True)
    assert verdict(tmp_path).verified
    return tmp_path


@pytest.mark.parametrize(("path", "value", "why"), LIES, ids=[f"{p}={str(v)[:20]}" for p, v, _ in LIES])
def test_a_manifest_that_lies_to_dcp_fills_nothing(through_dcp: Path, path: str, value: Json, why: str) -> None:
    forge(through_dcp, setter(path, value))
    into = {"v": torch.zeros(4, 3), "w": torch.zeros(4, 3)}
    with pytest.raises(CorruptCheckpointError, match=rf"state for DCP.*{why}"):
        reader.StorageReader(through_dcp).read_metadata()
    with pytest.raises(CheckpointException):
        dcp.load(into, storage_reader=reader.StorageReader(through_dcp), no_dist=True)
    assert not any(tensor.any() for tensor in into.values())
    assert "state for DCP" in verdict(through_dcp).reason


@pytest.mark.parametrize("value", [{"$map": 5}, {"$float": 10**400}, {"$bytes": 1}, {"$tensor": "w"}, {"$x": 1}])
def test_a_value_for_dcp_that_is_none_is_typed(through_dcp: Path, value: Json) -> None:
    forge(through_dcp, setter("state|dcp|values|lr", value))
    into = {"v": torch.zeros(4, 3), "w": torch.zeros(4, 3), "lr": 0.0}
    with pytest.raises(CheckpointException) as raised:
        dcp.load(into, storage_reader=reader.StorageReader(through_dcp), no_dist=True)
    assert all(isinstance(error, HoldfastError) for error, _ in raised.value.failures.values())
