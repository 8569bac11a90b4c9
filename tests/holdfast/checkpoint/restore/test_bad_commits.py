"""Commits made to do harm, sealed like good ones: each is refused with a typed error or passed by, within bounds, and
nothing but `quarantine/` is written.

Damage by chance is in `test_damage.py`; headers on their own in `test_safetensors_header.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from mutations import CHANGES, FUZZ, kept, little_memory, mutated
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from holdfast import HoldfastError, checkpoint
from holdfast.checkpoint.dcp import reader, writer
from holdfast.checkpoint.folder.claims import write_claim
from holdfast.checkpoint.format.manifest import LARGEST, decode
from holdfast.checkpoint.format.records import CHUNK_BYTES
from holdfast.checkpoint.ranks.exchange import Alone
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.saving.checkpoint_index import Ages
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints.main import Exit, main
from holdfast.cli.checkpoints.verify import Verification, verify
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import ClaimError, DamagedError, StateError, UnknownFormatError

Json = Any
NEWEST = "step-20.g0.a1"
TENSORS = "rank-0.safetensors"


def objects(value: float) -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, value)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two good commits: 10 and 20."""
    folder = tmp_path / "tier"
    for step in (10, 20):
        checkpoint.save(folder, step=step, **objects(float(step)))
    return folder


def sealed(document: Json) -> bytes:
    body = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return body[:-1] + f',"manifestDigest":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()


def forge(root: Path, change: Callable[[Json], Any]) -> None:
    """Change the newest manifest and seal it again."""
    path = root / NEWEST / "MANIFEST.json"
    document = json.loads(path.read_bytes())
    del document["manifestDigest"]
    change(document)
    path.write_bytes(sealed(document))


def replace_file(root: Path, data: bytes, name: str = TENSORS) -> None:
    """Another file in the place of one, with its true digests in the manifest."""
    (root / NEWEST / name).write_bytes(data)
    parts = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
    record = {
        "bytes": len(data),
        "digest": xxhash.xxh3_128_hexdigest(data),
        "chunks": [xxhash.xxh3_128_hexdigest(part) for part in parts],
    }
    forge(root, lambda document: document["files"].update({name: record}))


def reheaded(root: Path, change: Callable[[Json], Any]) -> bytes:
    """The newest commit's tensors behind another header of the same length."""
    raw = (root / NEWEST / TENSORS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    return raw[:8] + json.dumps(header).encode().ljust(length) + raw[8 + length :]


def outside(root: Path) -> dict[str, bytes]:
    """All that lies around the tier, and in it but for the commits and the quarantine."""
    files = [path for path in root.parent.rglob("*") if path.is_file() and not path.is_symlink()]
    return {
        str(path.relative_to(root.parent)): path.read_bytes()
        for path in files
        if "quarantine" not in path.parts and NEWEST not in path.parts
    }


def falls_back(root: Path, why: str) -> None:
    """The newest is refused for this reason, and step 10 restored."""
    around = outside(root)
    fresh = objects(0.0)
    with little_memory():
        found = checkpoint.load(root, **fresh)
    assert found is not None
    assert found.step == 10
    assert why in found.quarantined[0].reason
    assert float(fresh["model"].weight.detach()[0, 0]) == 10.0
    assert outside(root) == around


def verdict(root: Path) -> Verification:
    """What `holdfast checkpoints verify` says of the newest."""
    store = FolderStore(root)
    return verify(store, max(store.commits(), key=lambda name: name.step))


def setter(path: str, value: Json) -> Callable[[Json], None]:
    """Put a value at `a/b/0/c`."""

    def change(document: Json) -> None:
        *parents, last = [int(part) if part.isdigit() else part for part in path.split("|")]
        for part in parents:
            document = document[part]
        document[last] = value

    return change


WEIGHT = "tensors|model/weight"
FORGERIES: list[tuple[str, Json, str]] = [
    ("files", {}, "do not make it up"),
    ("files|../../../etc/passwd", {"bytes": 1, "digest": "", "chunks": [""]}, "names a file that no commit has"),
    ("files|/etc/passwd", {"bytes": 1, "digest": "", "chunks": [""]}, "names a file that no commit has"),
    ("files|rank-0.pt", {"bytes": 1, "digest": "", "chunks": [""]}, "names a file that no commit has"),
    ("files|rank-00.json", {"bytes": 1, "digest": "", "chunks": [""]}, "names a file that no commit has"),
    ("files|rank-7.json", {"bytes": 0, "digest": "", "chunks": []}, "of no rank of a world of 1"),
    (f"files|{TENSORS}|bytes", 10 * 2**30, "digests"),
    (f"files|{TENSORS}|bytes", -1, "no such number"),
    (f"files|{TENSORS}|bytes", 10**30, "no such number"),
    (f"files|{TENSORS}|bytes", 4096.0, "no such number"),
    (f"files|{TENSORS}|chunks", "x", "not a list"),
    (f"{WEIGHT}|chunks|0|file", "../step-10.g0.a1/rank-0.safetensors", "do not make it up"),
    (f"{WEIGHT}|chunks|0|offset", -8, "no such number"),
    (f"{WEIGHT}|chunks|0|offset", 2**62, "do not make it up"),
    (f"{WEIGHT}|chunks|0|offset", True, "no such number"),
    (f"{WEIGHT}|chunks|0|bytes", 2**40, "do not make it up"),
    (f"{WEIGHT}|chunks", [], "do not make it up"),
    (f"{WEIGHT}|dtype", "F64", "do not make it up"),
    (f"{WEIGHT}|dtype", "PICKLE", "unknown dtype"),
    (f"{WEIGHT}|dtype", ["F32"], "not a string"),
    (f"{WEIGHT}|shape", [2**40, 2**40], "too large"),
    (f"{WEIGHT}|shape", [0] * 65, "too large"),
    (f"{WEIGHT}|shape", "22", "not a list"),
    ("tensors", [], "lacks what version 1 must have"),
    ("step", 21, "is that of step 21"),
    ("step", "20", "no such number"),
    ("generation", 9, "is that of step 20, attempt 9.1"),
    ("generation", None, "no such number"),
    ("world", {"size": 1}, "lacks what version 1 must have"),
    ("world|size", 10**30, "no such number"),
    ("world|mesh", {"data": -1}, "no such number"),
    ("state", None, "lacks what version 1 must have"),
    ("state|objects", [], "lacks what version 1 must have"),
    ("parent", "../../tmp", "no commit's name"),
    ("parent", "step-1.g1.a1.tmp-" + "0" * 32, "no commit's name"),
    ("numerics", 5, "lacks what version 1 must have"),
]


@pytest.mark.parametrize(("path", "value", "why"), FORGERIES, ids=[f"{p}={str(v)[:20]}" for p, v, _ in FORGERIES])
def test_a_manifest_that_lies_is_damage(root: Path, path: str, value: Json, why: str) -> None:
    forge(root, setter(path, value))
    falls_back(root, why)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b'{"format":NaN,"manifestDigest":""}', "holds what no manifest does"),
        (b'{"format":"holdfast-checkpoint","step":1e999,"manifestDigest":""}', "holds what no manifest does"),
        (b'{"a":' * 100_000, "not JSON"),
        (b"[" * 50_000 + b"]" * 50_000, "MANIFEST.json"),
        (b'{"manifestDigest":"","step":1' + b"0" * 5000 + b"}", "not JSON"),
        (b'{"manifestDigest":"","manifestDigest":""}', "digest differs"),
        (b'{"manifestDigest":{}}', "digest differs"),
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
        file.truncate(LARGEST + 1)  # holes: it takes no room
    falls_back(root, "more than it can have")


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


def test_a_small_file_does_not_fill_the_memory_by_being_many_tensors(root: Path) -> None:
    def claim(document: Json) -> None:
        tensor = document["tensors"]["model/weight"]
        document["tensors"] |= {f"copy-{i}": tensor for i in range(3)}

    forge(root, claim)
    falls_back(root, "two tensors share bytes")


# What it says to torch.distributed.checkpoint


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
    (f"{W}|size", [-4, 3], "no such number"),
    (f"{W}|dtype", "I32", "disagree about 'w'"),
    (f"{W}|dtype", [], "disagree about 'w'"),
    ("state|dcp|tensors|x", {"dtype": "F32", "size": [4], "boxes": []}, "disagree about 'x'"),
    ("state|dcp|tensors|x", {"dtype": "NOPE", "size": [0], "boxes": []}, "disagree about 'x'"),
    ("state|dcp|tensors", {}, "says nothing of the tensor 'v"),
    ("state|dcp|tensors", [], "cannot be read"),
    ("state|dcp|planner|w", 5, "cannot be read"),
    ("state|dcp|values", None, "cannot be read"),
    ("state|dcp", [], "cannot be read"),
]


@pytest.fixture(params=[False, True], ids=["whole", "apart"])
def through_dcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """As now, and as in earlier releases: boxes that are tensors of their own."""
    with monkeypatch.context() as earlier:
        if request.param:
            earlier.setattr(writer, "tiles", lambda size, boxes: False)
        ones = {"v": torch.ones(4, 3), "w": torch.ones(4, 3)}
        dcp.save(ones, storage_writer=writer.StorageWriter(tmp_path, step=20), no_dist=True)
    assert verdict(tmp_path).whole
    return tmp_path


@pytest.mark.parametrize(("path", "value", "why"), LIES, ids=[f"{p}={str(v)[:20]}" for p, v, _ in LIES])
def test_a_manifest_that_lies_to_dcp_fills_nothing(through_dcp: Path, path: str, value: Json, why: str) -> None:
    forge(through_dcp, setter(path, value))
    into = {"v": torch.zeros(4, 3), "w": torch.zeros(4, 3)}
    with pytest.raises(DamagedError, match=rf"state for DCP.*{why}"):
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


# Headers


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (setter("model/weight|dtype", "I32"), "disagree about 'model/weight'"),
        (setter("model/weight|shape", [4]), "disagree about 'model/weight'"),
        (setter("model/weight|shape", [3, 2]), "16 bytes for F32"),
        (setter("model/weight|data_offsets", [0, 2**40]), "header"),
        (setter("model/weight|data_offsets", [4, 20]), "header"),
        (setter("other", {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}), "disagree about 'other'"),
        (lambda header: header.update(nothing=header.pop("model/bias")), "disagree about 'model/bias'"),
        (lambda header: header.pop("model/bias"), "header"),
    ],
)
def test_a_header_that_says_other_than_the_manifest_is_damage(root: Path, change: Any, why: str) -> None:
    replace_file(root, reheaded(root, change))
    falls_back(root, why)


def test_a_header_that_swaps_two_tensors_is_damage(root: Path) -> None:
    def swap(header: Json) -> None:
        header["model/weight"], header["model/bias"] = header["model/bias"], header["model/weight"]

    replace_file(root, reheaded(root, swap))
    assert [damage.file for damage in verdict(root).damages] == [TENSORS]
    assert "disagree about" in verdict(root).reason
    falls_back(root, "disagree about")


def test_what_is_a_ranks_alone_and_no_json_is_damage_for_verify_as_for_a_restore(root: Path) -> None:
    replace_file(root, b"not JSON", "rank-0.json")
    assert "rank-0.json is not JSON" in verdict(root).reason
    falls_back(root, "rank-0.json is not JSON")


def test_a_file_with_no_room_for_a_header_is_damage(root: Path) -> None:
    for data in (b"", b"1234567", (2**63).to_bytes(8, "little")):
        replace_file(root, data)
        with pytest.raises(DamagedError):
            decode((root / NEWEST / "MANIFEST.json").read_bytes())  # its tensors are outside of the file


# Entries of the folder


@pytest.mark.parametrize("name", ["MANIFEST.json", TENSORS, "rank-0.json"])
def test_a_symbolic_link_is_not_followed(root: Path, name: str) -> None:
    path = root / NEWEST / name
    moved = path.rename(root.parent / "elsewhere")
    path.symlink_to(moved)
    falls_back(root, "symbolic link")


def test_nothing_is_moved_aside_through_a_link(root: Path) -> None:
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    (root / "quarantine").symlink_to(elsewhere)
    (root / NEWEST / "MANIFEST.json").write_text("{")
    found = restore(root, Alone())
    assert found.loaded is not None
    assert (list(elsewhere.iterdir()), (root / NEWEST).is_dir()) == ([], True)


def test_a_linked_commit_is_not_followed(root: Path) -> None:
    moved = (root / NEWEST).rename(root.parent / "elsewhere")
    (root / NEWEST).symlink_to(moved)
    falls_back(root, "symbolic link")


@pytest.mark.parametrize("name", ["MANIFEST.json", TENSORS])
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_pipe_or_folder_in_a_files_place_neither_blocks_nor_is_read(root: Path, name: str, put: Any) -> None:
    (root / NEWEST / name).unlink()
    put(root / NEWEST / name)
    falls_back(root, name)


def test_another_commit_under_a_newer_name_is_not_taken_for_it(root: Path) -> None:
    (root / "step-10.g0.a1").rename(root / "step-99.g9.a1")
    (root / NEWEST).rename(root / "step-10.g0.a1")
    with pytest.raises(checkpoint.CheckpointError, match=r"no commit in .* is whole"):
        checkpoint.load(root, **objects(0.0))


@pytest.mark.parametrize("raw", [b"null", b"[]", b"5", b"[" * 3_000, b'{"version":1}', b""])
def test_what_is_no_claim_stops_a_load_and_says_so(root: Path, raw: bytes) -> None:
    """A fence must not be overlooked."""
    (root / "claims").mkdir()
    (root / "claims" / "1.1.json").write_bytes(raw)
    with pytest.raises(ClaimError, match=r"1\.1\.json is not a claim that this release can read"):
        checkpoint.load(root, **objects(0.0))
    assert main(["ls", str(root)]) == Exit.UNREADABLE


def test_a_zombies_commit_is_not_read_whatever_its_name_says(root: Path, commit: Callable[..., Any]) -> None:
    """Above its successor's claim by step; and renamed, above it by attempt too."""
    for pair, origin in ((AttemptId(1, 1), None), (AttemptId(1, 2), AttemptId(1, 1))):
        write_claim(root, Claim(pair=pair, job_uid="job-1", publication="p1", from_step=30, from_pair=origin))
    commit(root, 30, {"w": b"good"}, AttemptId(1, 1))
    commit(root, 40, {"w": b"late"}, AttemptId(1, 1))
    claims = tuple(
        Claim(pair=AttemptId(1, number), job_uid="job-1", publication="p1", from_step=30, from_pair=AttemptId(1, 1))
        for number in (2,)
    )
    assert restore(root, Alone(), claims=claims, job_uid="job-1").step == 30
    (root / "step-40.g1.a1").rename(root / "step-40.g1.a2")
    found = restore(root, Alone(), claims=claims, job_uid="job-1")
    assert found.step == 30
    assert "is that of step 40, attempt 1.1" in found.quarantined[0].reason


# What is whole and asks for nonsense: a state that no object takes


@pytest.mark.parametrize(
    "value",
    [
        {"weight": {"$tensor": "nowhere"}, "bias": {"$tensor": "model/bias"}},
        {"weight": {"$tensor": ["model/weight"]}},
        {"weight": {"$rows": ["model/weight", [10**9, 10**9]]}, "bias": {"$tensor": "model/bias"}},
        {"weight": {"$code": "import os"}},
        {"$map": 5},
        {"$map": [[{"$map": []}, 1]]},
        {"$bytes": "?"},
        [],
        None,
    ],
    ids=str,
)
def test_a_state_that_is_none_is_refused_and_changes_nothing(root: Path, value: Json) -> None:
    forge(root, setter("state|objects|model", value))
    fresh = objects(0.5)
    before = {name: tensor.clone() for name, tensor in fresh["model"].state_dict().items()}
    around = outside(root)
    with little_memory(), pytest.raises(StateError):
        checkpoint.load(root, **fresh)
    assert all(torch.equal(tensor, before[name]) for name, tensor in fresh["model"].state_dict().items())
    assert outside(root) == around


def test_generators_that_are_none_are_refused_and_change_nothing(root: Path) -> None:
    good = json.loads((root / NEWEST / "rank-0.json").read_bytes())
    for change in (setter("rng", {}), setter("rng|torch", "AAAA"), setter("rng|numpy|keys", "?"), setter("rng", 1)):
        document = json.loads(json.dumps(good))
        change(document)
        replace_file(root, json.dumps(document).encode(), "rank-0.json")
        fresh, generator = objects(0.5), torch.get_rng_state()
        with pytest.raises(StateError, match="random generators"):
            checkpoint.load(root, **fresh)
        assert float(fresh["model"].weight.detach()[0, 0]) == 0.5
        assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("data", [b"{", b"\xff", b"[" * 100_000], ids=len)
def test_a_ranks_own_file_that_is_not_json_is_damage(root: Path, data: bytes) -> None:
    replace_file(root, data, "rank-0.json")
    falls_back(root, "rank-0.json is not JSON")


# Anything


def survives(root: Path) -> None:
    """A load is refused by a typed error, or gives a whole state; nothing lies outside that was not there."""
    around = outside(root)
    fresh = objects(0.0)
    try:
        checkpoint.load(root, step=20, **fresh)
    except HoldfastError:
        assert float(fresh["model"].weight.detach()[0, 0]) == 0.0
    assert outside(root) == around


@pytest.fixture
def again(root: Path) -> Callable[[], Path]:
    """The newest commit as it was, whatever became of it in the example before."""
    good = {path.name: path.read_bytes() for path in (root / NEWEST).iterdir()}

    def put_back() -> Path:
        (root / NEWEST).mkdir(exist_ok=True)
        for name, data in good.items():
            (root / NEWEST / name).write_bytes(data)
        return root

    return put_back


@FUZZ
@given(changes=CHANGES)
@kept("manifest")
def test_any_manifest_under_a_true_seal_is_taken_or_refused(again: Callable[[], Path], changes: Any) -> None:
    root = again()
    mutate_manifest(root, changes)
    survives(root)


@FUZZ
@given(changes=CHANGES)
@kept("commands")
def test_any_manifest_under_a_true_seal_gets_an_exit_code_of_each_command(
    again: Callable[[], Path], changes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    root = again()
    mutate_manifest(root, changes)
    around = outside(root)
    newest = str(root / NEWEST)
    with TemporaryDirectory() as scratch:
        exported = ["export", newest, f"{scratch}/x.safetensors"]
        for words in (
            ["ls", str(root)],
            ["show", newest],
            ["verify", newest],
            ["diff", newest, str(root)],
            ["copy", newest, f"{scratch}/copy"],
            ["prune", str(root), "--keep-last", "1", "--dry-run"],
            [*exported, "--object", "model"],
            [*exported, "--object", "optimizer"],
        ):
            assert main(words) in set(Exit), words
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())
    assert outside(root) == around


@pytest.mark.parametrize(
    "tree",
    [
        {"w": {"$tensor": "model/none"}},
        {"w": {"$rows": []}},
        {"w": {"$rows": 1}},
        {"\ud800": {"$tensor": "model/weight"}},
    ],
    ids=str,
)
def test_an_object_that_is_no_state_of_tensors_is_not_exported(root: Path, tree: Json, tmp_path: Path) -> None:
    forge(root, setter("state|objects|model", tree))
    assert main(["export", str(root / NEWEST), str(tmp_path / "x.safetensors"), "--object", "model"]) == Exit.BAD
    assert not (tmp_path / "x.safetensors").exists()


def test_what_no_number_and_no_time_is_counts_for_no_rule(root: Path) -> None:
    forge(root, setter("state|metrics", [[20, {"loss": 10**400}]]))
    forge(root, setter("created", "0001-01-01T00:00:00+14:00"))
    (entry,) = [one for one in Ages(FolderStore(root)).look() if one.commit.step == 20]
    assert (entry.created, dict(entry.metrics)) == (None, {})


def mutate_manifest(root: Path, changes: Any) -> None:
    path = root / NEWEST / "MANIFEST.json"
    document = json.loads(path.read_bytes())
    del document["manifestDigest"]
    path.write_bytes(sealed(mutated(document, changes)))


@FUZZ
@given(changes=CHANGES)
@kept("header")
def test_any_header_under_true_digests_is_taken_or_refused(again: Callable[[], Path], changes: Any) -> None:
    root = again()
    replace_file(root, reheaded(root, lambda header: mutated(header, changes)))
    survives(root)


@FUZZ
@given(raw=st.binary(max_size=64) | st.binary(max_size=24).map(lambda b: b'{"manifestDigest":"' + b + b'"}\n'))
def test_any_bytes_are_no_manifest(raw: bytes) -> None:
    with pytest.raises((DamagedError, UnknownFormatError)):
        decode(raw)
