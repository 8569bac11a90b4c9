"""`holdfast checkpoints` ls, show and verify."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_folders import FIRST, MIB, flip, offset_of, reseal, tree
from command_line import Commands

from holdfast.checkpoint.folder.claims import write_claim
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.stores.base import CheckpointStore
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints.verify import Damage, Verification, verify
from holdfast.core.attempt import AttemptId, Claim

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
        Claim(
            attempt_id=AttemptId(2, 1),
            job_uid="job-1",
            publication="p2",
            from_step=10,
            from_attempt_id=AttemptId(1, 1),
        ),
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


def test_show_describes_a_checkpoint_by_default_the_newest(holdfast: Commands, folder: Path) -> None:
    """Only a checkpoint that may be read is chosen by default."""
    write_claim(
        folder,
        Claim(
            attempt_id=AttemptId(2, 1),
            job_uid="job-1",
            publication="p2",
            from_step=10,
            from_attempt_id=AttemptId(1, 1),
        ),
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

    assert [(one["commit"], one["verified"]) for one in judged] == [("step-20.g1.a1", True), ("step-10.g1.a1", True)]
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
    assert "MANIFEST.json: its own digest does not match" in holdfast.out
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

    assert (newest["verified"], older["gone"], older["damage"]) == (True, True, [])


def test_a_newer_version_is_not_judged_and_not_moved(holdfast: Commands, folder: Path) -> None:
    reseal(folder / "step-20.g1.a1", lambda manifest: manifest.update(version=9))
    before = tree(folder)

    assert holdfast("verify", folder, "--quarantine") == 3
    assert "version 9" in holdfast.out
    assert "step-10.g1.a1: complete" in holdfast.out
    assert holdfast("show", folder) == 3
    assert "step-20.g1.a1" in holdfast.err
    assert tree(folder) == before
