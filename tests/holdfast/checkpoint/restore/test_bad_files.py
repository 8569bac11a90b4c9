"""Malicious headers, links and states are refused and change nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forged_commits import (
    NEWEST,
    TENSORS,
    Json,
    falls_back,
    forge,
    objects,
    outside,
    reheaded,
    replace_file,
    setter,
    verdict,
)
from mutations import little_memory

from holdfast import checkpoint
from holdfast.checkpoint.folder.claims import write_claim
from holdfast.checkpoint.format.manifest import decode
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.restore.search import restore
from holdfast.cli.checkpoints.main import Exit, main
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import ClaimError, CorruptCheckpointError, StateError

# Headers


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (setter("model/weight|dtype", "I32"), "differ for 'model/weight'"),
        (setter("model/weight|shape", [4]), "differ for 'model/weight'"),
        (setter("model/weight|shape", [3, 2]), "16 bytes for F32"),
        (setter("model/weight|data_offsets", [0, 2**40]), "header"),
        (setter("model/weight|data_offsets", [4, 20]), "header"),
        (setter("other", {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}), "differ for 'other'"),
        (lambda header: header.update(nothing=header.pop("model/bias")), "differ for 'model/bias'"),
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
    assert "differ for" in verdict(root).reason
    falls_back(root, "differ for")


def test_per_rank_file_without_json_is_corrupt_everywhere(root: Path) -> None:
    """`verify` and a restore both report the corruption."""
    replace_file(root, b"not JSON", "rank-0.json")
    assert "rank-0.json is not JSON" in verdict(root).reason
    falls_back(root, "rank-0.json is not JSON")


def test_a_file_with_no_room_for_a_header_is_damage(root: Path) -> None:
    for data in (b"", b"1234567", (2**63).to_bytes(8, "little")):
        replace_file(root, data)
        with pytest.raises(CorruptCheckpointError):
            decode((root / NEWEST / "MANIFEST.json").read_bytes())  # its tensors are outside of the file


# Folder entries


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
    found = restore(root, SingleRank())
    assert found.loaded is not None
    assert (list(elsewhere.iterdir()), (root / NEWEST).is_dir()) == ([], True)


def test_a_linked_commit_is_not_followed(root: Path) -> None:
    moved = (root / NEWEST).rename(root.parent / "elsewhere")
    (root / NEWEST).symlink_to(moved)
    falls_back(root, "symbolic link")


@pytest.mark.parametrize("name", ["MANIFEST.json", TENSORS])
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_pipe_or_folder_in_place_of_a_file_is_not_read(root: Path, name: str, put: Any) -> None:
    """Neither blocks the reader."""
    (root / NEWEST / name).unlink()
    put(root / NEWEST / name)
    falls_back(root, name)


def test_another_commit_under_a_newer_name_is_not_taken_for_it(root: Path) -> None:
    (root / "step-10.g0.a1").rename(root / "step-99.g9.a1")
    (root / NEWEST).rename(root / "step-10.g0.a1")
    with pytest.raises(checkpoint.CheckpointError, match=r"no complete checkpoint in .*"):
        checkpoint.load(root, **objects(0.0))


@pytest.mark.parametrize("raw", [b"null", b"[]", b"5", b"[" * 3_000, b'{"version":1}', b""])
def test_what_is_no_claim_stops_a_load_and_says_so(root: Path, raw: bytes) -> None:
    """A fence must not be ignored."""
    (root / "claims").mkdir()
    (root / "claims" / "1.1.json").write_bytes(raw)
    with pytest.raises(ClaimError, match=r"this release cannot read the claim .*1\.1\.json"):
        checkpoint.load(root, **objects(0.0))
    assert main(["ls", str(root)]) == Exit.UNREADABLE


def test_a_zombies_commit_is_not_read_whatever_its_name_says(root: Path, commit: Callable[..., Any]) -> None:
    """Its step is above that of the successor's claim. If renamed, its attempt ID is too."""
    for attempt_id, origin in ((AttemptId(1, 1), None), (AttemptId(1, 2), AttemptId(1, 1))):
        write_claim(
            root,
            Claim(attempt_id=attempt_id, job_uid="job-1", publication="p1", from_step=30, from_attempt_id=origin),
        )
    commit(root, 30, {"w": b"good"}, AttemptId(1, 1))
    commit(root, 40, {"w": b"late"}, AttemptId(1, 1))
    claims = tuple(
        Claim(
            attempt_id=AttemptId(1, number),
            job_uid="job-1",
            publication="p1",
            from_step=30,
            from_attempt_id=AttemptId(1, 1),
        )
        for number in (2,)
    )
    assert restore(root, SingleRank(), claims=claims, job_uid="job-1").step == 30
    (root / "step-40.g1.a1").rename(root / "step-40.g1.a2")
    found = restore(root, SingleRank(), claims=claims, job_uid="job-1")
    assert found.step == 30
    assert "belongs to step 40, attempt 1.1" in found.quarantined[0].reason


# Complete checkpoints with invalid content: a state that no object accepts


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
