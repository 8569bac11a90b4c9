"""Forged patches are refused with a typed error."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lossy_states import (
    ONE,
    State,
    patch_of,
    places,
)

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.manifest import decode
from holdfast.checkpoint.format.records import CHUNK_BYTES
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints.access.commit_reader import Content
from holdfast.cli.checkpoints.verify import verify
from holdfast.core.errors import CorruptCheckpointError

# Malicious content


def sealed(document: Any) -> bytes:
    body = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return body[:-1] + f',"manifestDigest":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()


def forge(root: Path, change: Callable[[Any, bytearray], object]) -> None:
    """Change the newest manifest and its file, with valid digests and seal."""
    folder = root / "step-3.g1.a1"
    file, path = folder / "rank-0.safetensors", folder / "MANIFEST.json"
    document, data = json.loads(path.read_bytes()), bytearray(file.read_bytes())
    del document["manifestDigest"]
    document["files"][file.name] = {"bytes": 0}
    change(document, data)
    record = {
        "bytes": len(data),
        "digest": xxhash.xxh3_128_hexdigest(data),
        "chunks": [xxhash.xxh3_128_hexdigest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)],
    }
    document["files"][file.name] = {**record, **{k: v for k, v in document["files"][file.name].items() if v}}
    file.write_bytes(data)
    path.write_bytes(sealed(document))


def refused(root: Path, why: str) -> None:
    """The newest checkpoint is refused with a typed error and little memory, and the previous one is restored."""
    tracemalloc.start()
    try:
        verdict = verify(FolderStore(root), CheckpointName(step=3, attempt_id=ONE))
        found = restore(root, SingleRank())
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert why in verdict.reason
    assert {one.path: why in one.reason for one in found.lost} == {"step-3.g1.a1": True}
    assert found.step == 2
    assert [path.name.split(".")[0] for path in (root / "quarantine").iterdir() if path.is_dir()] == ["step-3"]


@pytest.mark.parametrize(
    "values", [(300 * 512,), (2**32 - 1,), (7, 7), (9, 8), (153_599, 153_599), (153_599, 153_598)]
)
def test_positions_out_of_range_order_or_repeated_are_refused(
    lossy: tuple[Path, list[State]], values: tuple[int, ...]
) -> None:
    root, _ = lossy
    forge(root, places(*values))
    with (
        Content(FolderStore(root), CheckpointName(step=3, attempt_id=ONE)) as content,
        pytest.raises(CorruptCheckpointError),
    ):
        content.tensor("weight")
    (damage,) = verify(FolderStore(root), CheckpointName(step=3, attempt_id=ONE)).damages
    assert damage.tensors == ("weight",)
    refused(root, "does not name elements of its rows in order")


def setter(**fields: Any) -> Callable[[Any, bytearray], None]:
    return lambda document, _: patch_of(document).update(fields)


def twice(document: Any, _: bytearray) -> None:
    document["tensors"]["weight"]["patches"] *= 2


def of_version(version: int) -> Callable[[Any, bytearray], None]:
    return lambda document, _: document.update(version=version)


def without(document: Any, _: bytearray) -> None:
    del document["tensors"]["weight"]["patches"]


def of_integers(document: Any, _: bytearray) -> None:
    document["tensors"]["weight"]["dtype"] = "I32"


def huge(document: Any, _: bytearray) -> None:
    """A file record of 10 GB, a patch of 10 GB in it, and a tensor that fits the patch."""
    nbytes = 10 << 30
    document["files"]["rank-0.safetensors"] = {"bytes": nbytes, "chunks": ["0" * 32] * (nbytes // CHUNK_BYTES)}
    patch_of(document).update(count=300 * 512, values=5 << 30)


HARM: list[tuple[str, Callable[[Any, bytearray], object], str]] = [
    ("more elements than there are", setter(count=401), "is in no file of the checkpoint"),
    ("fewer elements than there are", setter(count=399), "differ for"),
    ("more elements than rows have", setter(count=300 * 512 + 1), "has 153601 elements"),
    ("10 GB of elements", setter(count=10 << 28), "has 2684354560 elements"),
    ("no number of elements", setter(count=-1), "not a valid number"),
    ("a fraction of elements", setter(count=0.5), "not a valid number"),
    ("places behind the file", setter(places=1 << 40), "is in no file of the checkpoint"),
    ("values behind the file", setter(values=1 << 40), "is in no file of the checkpoint"),
    ("places and values in one place", setter(values=4096, places=4096), "share bytes"),
    ("rows behind the tensor", setter(start=[1, 0]), "is outside its rows"),
    ("columns", setter(shape=[300, 5]), "is outside its rows"),
    ("another number of dimensions", setter(start=[0], shape=[300]), "is outside its rows"),
    ("no dimensions", setter(start=[], shape=[]), "is outside its rows"),
    ("the same rows twice", twice, "is outside its rows"),
    ("integers", of_integers, "is outside its rows"),
    (
        "a file of an earlier commit",
        setter(file="step-1.g1.a1/rank-0.safetensors"),
        "is in no file of the checkpoint",
    ),
    ("a file that is no commit's", setter(file="../../etc/passwd"), "is in no file of the checkpoint"),
    ("a rank's own file", setter(file="rank-0.json"), "is in no file of the checkpoint"),
    ("a bound of nothing", setter(bound=0.0), "is not a valid bound"),
    ("a bound below nothing", setter(bound=-1e-3), "is not a valid bound"),
    ("a bound above all", setter(bound=1e300), "is not a valid bound"),
    ("a bound in words", setter(bound="little"), "is not a valid bound"),
    ("the version of exact deltas", of_version(2), "contains fields of version 3"),
    ("no patches", without, "contains fields of version 2"),
    ("a file of 10 GB", huge, "bytes instead of 10737418240"),
]


@pytest.mark.parametrize(("change", "why"), [pytest.param(change, why, id=name) for name, change, why in HARM])
def test_a_patch_that_is_none_is_refused_with_a_typed_error(
    lossy: tuple[Path, list[State]], change: Callable[[Any, bytearray], object], why: str
) -> None:
    root, _ = lossy
    forge(root, change)
    refused(root, why)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    field=st.sampled_from(["file", "places", "values", "count", "start", "shape", "bound"]),
    value=st.none()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.lists(st.integers(-2, 2**40), max_size=4),
)
def test_any_patch_is_read_or_refused_with_a_typed_error(known: tuple[bytes, Any], field: str, value: Any) -> None:
    document = json.loads(json.dumps(known[1]))
    patch_of(document)[field] = value
    try:
        assert decode(sealed(document)).version == 3
    except CorruptCheckpointError:
        assert value != known[1]["tensors"]["weight"]["patches"][0][field]


@pytest.fixture
def known(lossy: tuple[Path, list[State]]) -> tuple[bytes, Any]:
    raw = (lossy[0] / "step-3.g1.a1" / "MANIFEST.json").read_bytes()
    document = json.loads(raw)
    del document["manifestDigest"]
    assert sealed(document) == raw
    return raw, document
