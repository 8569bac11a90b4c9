"""`holdfast checkpoints`: what it says, what it leaves alone, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from command_line import Commands

from holdfast import checkpoint
from holdfast.checkpoint.folder.claims import write_claim
from holdfast.checkpoint.folder.upload_marker import held
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.stores.base import CheckpointStore
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints.access.progress_bar import Progress
from holdfast.cli.checkpoints.verify import Damage, Verification, verify
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.settings import format_size

MIB = 1 << 20
FIRST = {"model/a": b"a" * 99, "model/b": b"b" * 7 * MIB, "model/c": b"c" * 2 * MIB, "model/d": b"d" * 5}


class Box:
    """Anything with a state."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        self._state = state


@pytest.fixture
def folder(tmp_path: Path, commit: Callable[..., Any]) -> Path:
    root = tmp_path / "ckpt"
    commit(root, 10, FIRST)
    commit(root, 20, {**FIRST, "model/b": b"x" * 7 * MIB})
    return root


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def reseal(folder: Path, change: Callable[[Any], Any]) -> None:
    """Have a commit's manifest say something else, under a seal of its own."""
    path = folder / "MANIFEST.json"
    document = json.loads(path.read_bytes())
    document.pop("manifestDigest")
    change(document)
    body = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    path.write_bytes(body[:-1] + f',"manifestDigest":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode())


def offset_of(root: Path, name: str, tensor: str) -> int:
    manifest = json.loads((root / name / "MANIFEST.json").read_bytes())
    return int(manifest["tensors"][tensor]["chunks"][0]["offset"])


# ls and show


def test_ls_names_every_commit_the_newest_first(holdfast: Commands, folder: Path) -> None:
    listed = holdfast.json("ls", folder)["commits"]

    assert [(line["commit"], line["state"], line["tensors"]) for line in listed] == [
        ("step-20.g1.a1", "readable", 4),
        ("step-10.g1.a1", "readable", 4),
    ]
    assert holdfast("ls", f"file://{folder}") == 0
    assert holdfast("ls", f"file://localhost{folder}") == 0
    assert "step-20.g1.a1" in holdfast.out


def test_ls_says_what_cannot_be_used_and_why(holdfast: Commands, folder: Path) -> None:
    write_claim(
        folder,
        Claim(pair=AttemptId(2, 1), job_uid="job-1", publication="p2", from_step=10, from_pair=AttemptId(1, 1)),
    )
    flip(folder / "step-10.g1.a1" / "MANIFEST.json", 5)

    fenced, damaged = holdfast.json("ls", folder)["commits"]

    assert (fenced["state"], fenced["note"]) == ("fenced", "fenced by claim 2.1 from step 10")
    assert damaged["state"] == "damaged"
    assert "MANIFEST.json" in damaged["note"]


@pytest.mark.parametrize("name", ["step-020.g1.a1", "step-20.g01.a1", "step-20.g1.a01"])
def test_a_folder_whose_name_only_reads_like_a_commits_is_none(holdfast: Commands, folder: Path, name: str) -> None:
    (folder / "step-20.g1.a1").rename(folder / name)
    assert [line["commit"] for line in holdfast.json("ls", folder)["commits"]] == ["step-10.g1.a1"]
    assert holdfast("prune", folder, "--keep-last", "1") == 0
    assert (folder / name).is_dir()


def test_show_tells_what_a_commit_holds_the_newest_that_may_be_read_by_itself(
    holdfast: Commands, folder: Path
) -> None:
    write_claim(
        folder,
        Claim(pair=AttemptId(2, 1), job_uid="job-1", publication="p2", from_step=10, from_pair=AttemptId(1, 1)),
    )

    shown = holdfast.json("show", folder)

    assert (shown["step"], shown["world"], shown["parent"]) == (10, {"size": 1, "mesh": {"data": 1}}, None)
    assert {"name": "model/d", "dtype": "U8", "shape": [5], "bytes": 5} in shown["tensors"]
    assert holdfast.json("show", folder, "--step", 20)["fence"] == "fenced by claim 2.1 from step 10"
    assert holdfast("show", folder / "step-10.g1.a1") == 0
    assert "model/d" in holdfast.out


# verify


def test_verify_reads_every_commit_and_changes_nothing(holdfast: Commands, folder: Path) -> None:
    before = tree(folder)

    judged = holdfast.json("verify", folder)["commits"]

    assert [(one["commit"], one["whole"]) for one in judged] == [("step-20.g1.a1", True), ("step-10.g1.a1", True)]
    assert tree(folder) == before


@pytest.mark.parametrize("tensor", FIRST)
def test_verify_names_the_damaged_tensor(holdfast: Commands, folder: Path, tensor: str) -> None:
    shard = folder / "step-10.g1.a1" / "rank-0.safetensors"
    last = offset_of(folder, "step-10.g1.a1", tensor) + len(FIRST[tensor]) - 1
    flip(shard, last)
    before = tree(folder)

    (judged,) = holdfast.json("verify", folder / shard.parent, code=1)["commits"]

    (damage,) = judged["damage"]
    assert damage["file"] == shard.name
    assert tensor in damage["tensors"]
    assert tree(folder) == before


def test_verify_tells_of_each_way_in_which_a_commit_is_not_whole(holdfast: Commands, folder: Path) -> None:
    shard = folder / "step-20.g1.a1" / "rank-0.safetensors"
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 1)
    (folder / "step-20.g1.a1" / "rank-0.json").unlink()
    flip(folder / "step-10.g1.a1" / "MANIFEST.json", 40)

    assert holdfast("verify", folder) == 1

    assert "instead of" in holdfast.out
    assert "rank-0.json is missing" in holdfast.out
    assert "MANIFEST.json: its own digest differs" in holdfast.out
    assert "tensor model/a" in holdfast.out


def test_verify_moves_aside_what_is_damaged_when_it_is_told_to(holdfast: Commands, folder: Path) -> None:
    flip(folder / "step-20.g1.a1" / "rank-0.safetensors", 5 * MIB)

    newest, older = holdfast.json("verify", folder, "--quarantine", code=1)["commits"]

    assert (newest["quarantined"], older["quarantined"]) == (True, False)
    assert [line["step"] for line in holdfast.json("ls", folder)["commits"]] == [10]
    assert len(list((folder / "quarantine").glob("step-20*/MANIFEST.json"))) == 1


def test_verify_moves_aside_nothing_that_was_found_bad_only_once(
    holdfast: Commands, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def misread_at_first(store: CheckpointStore, name: CheckpointName) -> Verification:
        read.append(str(name))
        damages = (Damage(file="rank-0.safetensors", reason="a byte was flipped on its way"),)
        return replace(verify(store, name), damages=damages if len(read) == 1 else ())

    monkeypatch.setattr("holdfast.cli.checkpoints.main.verify", misread_at_first)
    commits = holdfast.json("verify", folder, "--quarantine")["commits"]
    assert [commit["quarantined"] for commit in commits] == [False, False]
    assert read == ["step-20.g1.a1", "step-20.g1.a1", "step-10.g1.a1"]


def test_what_retention_deletes_meanwhile_is_not_damaged(
    holdfast: Commands, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = FolderStore.open

    def delete_first(store: FolderStore, name: CheckpointName, file: str) -> Any:
        if name.step == 10:
            store.delete(name)
        return opened(store, name, file)

    monkeypatch.setattr(FolderStore, "open", delete_first)

    newest, older = holdfast.json("verify", folder)["commits"]

    assert (newest["whole"], older["gone"], older["damage"]) == (True, True, [])


def test_a_newer_version_is_not_judged_and_not_moved(holdfast: Commands, folder: Path) -> None:
    reseal(folder / "step-20.g1.a1", lambda manifest: manifest.update(version=9))
    before = tree(folder)

    assert holdfast("verify", folder, "--quarantine") == 3
    assert "version 9" in holdfast.out
    assert "step-10.g1.a1: whole" in holdfast.out
    assert holdfast("show", folder) == 3
    assert "step-20.g1.a1" in holdfast.err
    assert tree(folder) == before


# diff


def test_diff_names_what_changed_and_its_code_says_whether_anything_did(
    holdfast: Commands, folder: Path, commit: Callable[..., Any]
) -> None:
    commit(folder, 30, {"model/a": FIRST["model/a"], "model/c": b"c", "model/new": b"n"})

    changed = holdfast.json("diff", folder / "step-10.g1.a1", folder / "step-20.g1.a1", code=1)
    moved = holdfast.json("diff", folder / "step-10.g1.a1", folder, code=1)

    assert (changed["changed"], changed["same"], changed["added"], changed["missing"]) == (["model/b"], 3, [], [])
    assert (moved["added"], moved["missing"]) == (["model/new"], ["model/b", "model/d"])
    assert (moved["shape"], moved["changed"], moved["same"]) == (["model/c"], [], 1)
    assert holdfast("diff", folder, folder / "step-30.g1.a1") == 0


def test_diff_finds_the_same_tensors_in_commits_that_are_divided_otherwise(
    holdfast: Commands, tmp_path: Path, world: Callable[..., Any], commit_by: Callable[..., Any]
) -> None:
    for ranks in (1, 3):
        world(ranks, lambda exchange, ranks=ranks: commit_by(exchange, tmp_path / f"by-{ranks}", 5, FIRST))

    found = holdfast.json("diff", tmp_path / "by-1", tmp_path / "by-3")

    assert (found["differs"], found["same"]) == (False, 4)


def test_diff_tells_values_that_python_takes_for_equal_apart(holdfast: Commands, tmp_path: Path) -> None:
    before = {"none": None, "whole": 1, "flag": True, "same": [0, None, "x"]}
    for name, state in (("one", before), ("other", {"whole": 1.0, "flag": 1, "same": [0, None, "x"]})):
        checkpoint.save(tmp_path / name, step=1, box=Box(state))

    found = holdfast.json("diff", tmp_path / "one", tmp_path / "other", code=1)

    assert found["state"] == [f"state.objects.box.{key}" for key in ("flag", "none", "whole")]


def test_diff_compares_mappings_by_their_keys_and_tells_of_another_order(holdfast: Commands, tmp_path: Path) -> None:
    for name, state in (("one", {"b": 1, "a": {"y": 1, "x": 2}}), ("other", {"b": 3, "a": {"x": 2, "y": 1}, "c": 1})):
        random.seed(0)
        checkpoint.save(tmp_path / name, step=1, box=Box(state))

    found = holdfast.json("diff", tmp_path / "one", tmp_path / "other", code=1)
    assert found["state"] == ["state.objects.box.b", "state.objects.box.c"]

    for name, keys in (("third", "cab"), ("fourth", "bca")):
        random.seed(0)
        checkpoint.save(tmp_path / name, step=1, box=Box({key: ord(key) for key in keys}))
    assert holdfast.json("diff", tmp_path / "third", tmp_path / "fourth", code=1)["state"] == ["state.objects.box"]


def test_diff_names_the_ranks_whose_random_generators_differ(holdfast: Commands, tmp_path: Path) -> None:
    for name in ("one", "other"):
        random.random()
        checkpoint.save(tmp_path / name, step=1, box=Box({}))

    found = holdfast.json("diff", tmp_path / "one", tmp_path / "other", code=1)

    assert found["state"] == ["state.rank-0"]


def test_diff_takes_no_longer_for_a_world_that_claims_to_be_endless(
    holdfast: Commands, tmp_path: Path, commit_by: Callable[..., Any], world: Callable[..., list[Any]]
) -> None:
    for step in (1, 2):
        world(12, lambda exchange, step=step: commit_by(exchange, tmp_path, step, FIRST))
        reseal(tmp_path / f"step-{step}.g1.a1", lambda manifest: manifest["world"].update(size=1 << 62))
    assert holdfast.json("diff", tmp_path / "step-1.g1.a1", tmp_path / "step-2.g1.a1")["differs"] is False

    def of_another(manifest: Any) -> None:
        for rank in (2, 10):
            manifest["files"][f"rank-{rank}.json"]["digest"] = "0" * 32

    reseal(tmp_path / "step-2.g1.a1", of_another)
    found = holdfast.json("diff", tmp_path / "step-1.g1.a1", tmp_path / "step-2.g1.a1", code=1)
    assert found["state"] == ["state.rank-2", "state.rank-10"]


def test_diff_does_not_take_damage_for_a_change(holdfast: Commands, folder: Path) -> None:
    flip(folder / "step-20.g1.a1" / "rank-0.safetensors", offset_of(folder, "step-20.g1.a1", "model/b"))

    assert holdfast("diff", folder / "step-10.g1.a1", folder) == 1
    assert "digest of chunk" in holdfast.err
    assert "changed" not in holdfast.out


# copy


def test_a_copy_is_the_same_to_the_byte_and_is_made_once(holdfast: Commands, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "place"

    made = holdfast.json("copy", folder, target, "--step", 10)["commits"]
    again = holdfast.json("copy", folder, target)["commits"]

    assert [(one["commit"], one["fresh"]) for one in made] == [("step-10.g1.a1", True)]
    assert [(one["commit"], one["fresh"]) for one in again] == [("step-10.g1.a1", False), ("step-20.g1.a1", True)]
    assert {name: data for name, data in tree(target).items() if name != "LATEST"} == {
        name: data for name, data in tree(folder).items() if name != "LATEST"
    }


def test_a_damaged_commit_is_not_copied_and_leaves_nothing(holdfast: Commands, folder: Path, tmp_path: Path) -> None:
    flip(folder / "step-20.g1.a1" / "rank-0.safetensors", 3 * MIB)

    assert holdfast("copy", folder / "step-20.g1.a1", tmp_path / "new") == 1

    assert "digest of chunk 0 differs" in holdfast.err
    assert list((tmp_path / "new").iterdir()) == []


def test_a_copy_of_a_folder_takes_what_is_good_and_names_what_is_not(
    holdfast: Commands, folder: Path, tmp_path: Path, commit: Callable[..., Any]
) -> None:
    for step in (30, 40):
        commit(folder, step, FIRST)
    flip(folder / "step-10.g1.a1" / "rank-0.safetensors", 3 * MIB)
    (folder / "step-20.g1.a1" / "MANIFEST.json").write_text("{")
    (folder / "step-30.g1.a1" / "rank-0.safetensors").unlink()

    told = holdfast.json("copy", folder, tmp_path / "new", code=1)

    assert [one["commit"] for one in told["commits"]] == ["step-40.g1.a1"]
    assert told["notCopied"].keys() == {"step-10.g1.a1", "step-20.g1.a1", "step-30.g1.a1"}
    assert "step-20.g1.a1 was not copied: MANIFEST.json is not JSON" in holdfast.err
    assert [path.name for path in (tmp_path / "new").glob("step-*")] == ["step-40.g1.a1"]
    assert holdfast("verify", tmp_path / "new") == 0


@pytest.mark.parametrize("read", ["manifest", "open"])
def test_what_retention_deletes_while_it_is_copied_is_told_and_not_damaged(
    holdfast: Commands, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    act = getattr(FolderStore, read)

    def delete_first(store: FolderStore, name: CheckpointName, *file: str) -> Any:
        if name.step == 10 and store.url == str(folder):
            store.delete(name)
        return act(store, name, *file)

    monkeypatch.setattr(FolderStore, read, delete_first)

    told = holdfast.json("copy", folder, tmp_path / "new")

    assert [one["commit"] for one in told["commits"]] == ["step-20.g1.a1"]
    assert told["notCopied"] == {"step-10.g1.a1": "deleted while it was read"}
    assert not (tmp_path / "new" / "step-10.g1.a1").exists()


def test_a_commit_of_a_newer_format_does_not_keep_others_from_being_copied(
    holdfast: Commands, folder: Path, tmp_path: Path
) -> None:
    (folder / "step-20.g1.a1" / "MANIFEST.json").write_text('{"format": "of others"}')
    assert holdfast("copy", folder, tmp_path / "new") == 3
    assert "step-20.g1.a1 was not copied" in holdfast.err
    assert [path.name for path in (tmp_path / "new").glob("step-*")] == ["step-10.g1.a1"]


def test_a_copy_that_is_there_already_is_read_back(holdfast: Commands, folder: Path, tmp_path: Path) -> None:
    holdfast("copy", folder, tmp_path / "new")
    flip(tmp_path / "new" / "step-20.g1.a1" / "rank-0.safetensors", 3 * MIB)

    assert holdfast("copy", folder, tmp_path / "new") == 1

    assert "already, and it is damaged" in holdfast.err
    assert "--quarantine" in holdfast.err
    assert holdfast("verify", tmp_path / "new" / "step-20.g1.a1", "--quarantine") == 1
    assert holdfast("copy", folder, tmp_path / "new") == 0
    assert tree(tmp_path / "new" / "step-20.g1.a1") == tree(folder / "step-20.g1.a1")


def test_nothing_that_a_commit_says_moves_a_terminals_cursor(
    holdfast: Commands, tmp_path: Path, commit: Callable[..., Any]
) -> None:
    commit(tmp_path / "odd", 10, {"model/\x1b[2J\u202e": b"x" * 8})
    assert holdfast("show", tmp_path / "odd") == 0
    assert r"model/\x1b[2J\u202e" in holdfast.out
    assert "\x1b" not in holdfast.out


def test_a_copy_does_not_replace_another_commit_and_tells_of_a_fence(
    holdfast: Commands, folder: Path, tmp_path: Path, commit: Callable[..., Any]
) -> None:
    target = tmp_path / "other"
    commit(target, 20, {"model/a": b"other"})
    before = tree(target)

    assert holdfast("copy", folder / "step-20.g1.a1", target) == 3
    assert "another commit under the name" in holdfast.err
    assert tree(target) == before

    write_claim(
        target, Claim(pair=AttemptId(2, 1), job_uid="job-1", publication="p2", from_step=5, from_pair=AttemptId(1, 1))
    )
    assert holdfast("copy", folder / "step-10.g1.a1", target) == 0
    assert "the job of that folder will not read step-10.g1.a1: fenced by claim 2.1" in holdfast.err


def test_what_the_claims_fence_is_not_copied_without_them_unless_it_is_named(
    holdfast: Commands, folder: Path, tmp_path: Path, commit: Callable[..., Any]
) -> None:
    for pair, step, before in ((AttemptId(1, 1), 0, None), (AttemptId(2, 1), 20, AttemptId(1, 1))):
        write_claim(folder, Claim(pair=pair, job_uid="job-1", publication="p1", from_step=step, from_pair=before))
    commit(folder, 25, FIRST, AttemptId(2, 1))
    commit(folder, 30, FIRST)  # of attempt 1.1, after its successor claimed
    late = "step-30.g1.a1"

    told = holdfast.json("copy", folder, tmp_path / "new")

    assert [one["commit"] for one in told["commits"]] == ["step-10.g1.a1", "step-20.g1.a1", "step-25.g2.a1"]
    assert told["notCopied"] == {late: f"fenced by claim 2.1 from step 20; name {folder}/{late} to copy it"}
    assert f"{late} was not copied: fenced by claim 2.1" in holdfast.err
    assert not (tmp_path / "new" / late).exists()
    assert holdfast("copy", folder, tmp_path / "of_step", "--step", "30") == 3
    assert not (tmp_path / "of_step" / late).exists()
    assert holdfast("copy", folder / late, tmp_path / "named") == 0
    assert (tmp_path / "named" / late).exists()


def test_commits_go_to_a_store_of_objects_and_are_judged_there(holdfast: Commands, folder: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    url = f"memory:///{folder.parent.name}/tier"

    assert holdfast("copy", folder, url) == 0

    assert [line["step"] for line in holdfast.json("ls", url)["commits"]] == [20, 10]
    assert holdfast("verify", url) == 0
    assert holdfast.json("diff", folder, f"{url}/step-20.g1.a1")["same"] == 4
    fsspec.filesystem("memory").pipe_file(f"/{folder.parent.name}/tier/step-20.g1.a1/rank-0.json", b"{}")
    assert holdfast("verify", url, "--step", 20) == 1
    assert "rank-0.json" in holdfast.out


# prune


def test_prune_says_what_would_go_and_why_and_then_does_it(
    holdfast: Commands, folder: Path, commit: Callable[..., Any]
) -> None:
    commit(folder, 30, {"a": b"a"})
    before = tree(folder)
    words = ("prune", folder, "--keep-last", 1, "--rule", "every=20")

    told = holdfast.json(*words, "--dry-run")["commits"]
    assert tree(folder) == before
    assert holdfast(*words) == 0

    assert [(line["commit"], line["goes"], line["reason"]) for line in told] == [
        ("step-30.g1.a1", False, "among the last 1"),
        ("step-20.g1.a1", False, "every=20"),
        ("step-10.g1.a1", True, "older than the last 1, and no rule keeps it"),
    ]
    assert "step-10.g1.a1  deleted" in holdfast.out
    assert [line["step"] for line in holdfast.json("ls", folder)["commits"]] == [30, 20]


def test_prune_leaves_alone_what_is_on_its_way_to_an_object_store(holdfast: Commands, folder: Path) -> None:
    with held(folder, CheckpointName(step=10, pair=AttemptId(1, 1))):
        told = holdfast.json("prune", folder, "--keep-last", 1)["commits"]
    assert [(line["goes"], line["reason"]) for line in told] == [
        (False, "among the last 1"),
        (False, "on its way to the object store"),
    ]


def age(path: Path, hours: float) -> None:
    when = time.time() - 3600 * hours
    for one in (*path.iterdir(), path):
        os.utime(one, (when, when))


def test_prune_removes_what_killed_saves_and_deletions_left_a_day_ago(holdfast: Commands, folder: Path) -> None:
    old, paused, resumed = (f"step-{step}.g0.a1.tmp-{'0' * 32}" for step in (7, 8, 9))
    for name in (old, paused, resumed):
        (folder / name).mkdir()
        (folder / name / "rank-0.safetensors").write_bytes(b"x")
    (folder / "step-10.g1.a1" / "MANIFEST.json").rename(folder / "step-10.g1.a1" / "MANIFEST.json.deleted")
    for name, hours in ((old, 25), (paused, 23), (resumed, 25), ("step-10.g1.a1", 25), ("step-20.g1.a1", 25)):
        age(folder / name, hours)
    (folder / resumed / "rank-0.safetensors").write_bytes(b"xy")
    before = tree(folder)

    told = holdfast.json("prune", folder, "--keep-last", 1, "--dry-run")
    assert (told["leftovers"], tree(folder)) == (["step-10.g1.a1", old], before)
    assert holdfast("prune", folder, "--keep-last", 1) == 0

    assert f"{old}: deleted, left by a save" in holdfast.out
    assert {path.name for path in folder.glob("step-*")} == {"step-20.g1.a1", paused, resumed}


def test_prune_counts_only_what_it_has_read_back_whole(holdfast: Commands, folder: Path) -> None:
    flip(folder / "step-20.g1.a1" / "rank-0.safetensors", 3 * MIB)
    before = tree(folder)

    told = holdfast.json("prune", folder, "--keep-last", 1, code=1)

    assert told["damaged"] == ["step-20.g1.a1"]
    assert not any(line["goes"] for line in told["commits"])
    assert tree(folder) == before


# Errors


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("ls", "{root}/none"), 3, "no such folder"),
        (("ls", "{root}/file"), 3, "is a file"),
        (("ls", "s4://bucket/x"), 2, "s4"),
        (("ls", ""), 2, "an empty path"),
        (("ls", "s3://[x"), 2, "s3://[x is no URL"),
        (("verify", "file://[x/y"), 2, "file://[x/y is no URL"),
        (("ls", "memory://name:secret@[a"), 2, "checkpoints: memory://[a is no URL"),
        (("ls", "s3://bu\u2100cket/x"), 2, "is no URL"),
        (("copy", "{root}/ckpt", "file://[x/y"), 2, "file://[x/y is no URL"),
        (("show", "{root}/ckpt", "--step", "15"), 3, "no commit of step 15"),
        (("show", "{root}/ckpt", "--step", "x"), 2, "not a step"),
        (("show", "{root}/ckpt/step-10.g1.a1", "--step", "20"), 2, "is not of step 20"),
        (("show", "{root}/ckpt/step-11.g1.a1"), 3, "no commit step-11.g1.a1"),
        (("show", "{root}/renamed"), 3, "has not the name of a commit"),
        (("verify", "{root}/ckpt/step-10.g1.a1.tmp-" + "0" * 32), 3, "unfinished"),
        (("verify", "{root}/bare"), 3, ""),
        (("copy", "{root}/ckpt", "{root}/ckpt/step-10.g1.a1"), 2, "give the folder that is to hold it"),
        (("prune", "{root}/ckpt", "--keep-last", "1", "--rule", "monthly=3"), 2, "retention rule 'monthly=3'"),
        (("prune", "{root}/ckpt", "--keep-last", "0"), 2, "at least 1"),
        (("prune", "{root}/ckpt"), 2, "--keep-last"),
        (("frobnicate",), 2, "invalid choice"),
        ((), 2, "required"),
    ],
)
def test_what_cannot_be_done_is_said_with_its_exit_code(
    holdfast: Commands, folder: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    tmp_path = folder.parent
    (tmp_path / "file").touch()
    (tmp_path / "renamed").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "renamed" / "MANIFEST.json").write_bytes((folder / "step-10.g1.a1" / "MANIFEST.json").read_bytes())

    assert holdfast(*(word.format(root=tmp_path) for word in words)) == code
    assert said in holdfast.err


@pytest.mark.parametrize("url", ["github://x/y", "reference://x", "dbfs://x", "jlab://x", "dir://x", "generic://x"])
def test_a_url_that_says_too_little_for_its_file_system_is_named(holdfast: Commands, url: str) -> None:
    pytest.importorskip("fsspec")
    assert holdfast("ls", url) == 2
    assert url.rstrip("/") in holdfast.err


def test_the_commands_load_no_torch(folder: Path) -> None:
    code = f"""
import sys
from holdfast.cli.main import main
assert main(["checkpoints", "verify", {str(folder)!r}]) == 0
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_is_not_utf_8_gets_what_it_can_show(
    tmp_path: Path, commit: Callable[..., Any], encoding: str
) -> None:
    commit(tmp_path / "漢", 10, {"model/gewicht_漢": b"x"})
    shown, refused = (
        subprocess.run(
            [sys.executable, "-m", "holdfast", "checkpoints", "show", str(where)],
            env=os.environ | {"PYTHONIOENCODING": encoding},
            capture_output=True,
            text=True,
            timeout=120,
        )
        for where in (tmp_path / "漢", tmp_path / "字")
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert r"gewicht_\u6f22" in shown.stdout
    assert refused.returncode == 3
    assert r"\u5b57: no such folder" in refused.stderr


def test_progress_is_drawn_on_a_terminal_only() -> None:
    stream = io.StringIO()
    shown = Progress("verify", 200, stream)
    shown._drawn = float("-inf")

    shown.add(100)

    assert "50%" in stream.getvalue()
    assert [format_size(n) for n in (999, 1 << 10, 3 << 29)] == ["999 B", "1 KiB", "1.5 GiB"]
