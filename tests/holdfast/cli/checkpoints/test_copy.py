"""`holdfast checkpoints copy`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_folders import FIRST, MIB, flip, tree
from command_line import Commands

from holdfast.checkpoint.folder.claims import write_claim
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.core.attempt import AttemptId, Claim

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


def test_copy_of_a_folder_takes_good_ones_and_names_the_others(
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
def test_checkpoint_deleted_during_a_copy_is_not_corrupt(
    holdfast: Commands, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    """The deletion by retention is reported."""
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


def test_newer_format_does_not_prevent_copying_the_others(holdfast: Commands, folder: Path, tmp_path: Path) -> None:
    (folder / "step-20.g1.a1" / "MANIFEST.json").write_text('{"format": "of others"}')
    assert holdfast("copy", folder, tmp_path / "new") == 3
    assert "step-20.g1.a1 was not copied" in holdfast.err
    assert [path.name for path in (tmp_path / "new").glob("step-*")] == ["step-10.g1.a1"]


def test_a_copy_that_is_there_already_is_read_back(holdfast: Commands, folder: Path, tmp_path: Path) -> None:
    holdfast("copy", folder, tmp_path / "new")
    flip(tmp_path / "new" / "step-20.g1.a1" / "rank-0.safetensors", 3 * MIB)

    assert holdfast("copy", folder, tmp_path / "new") == 1

    assert "already, and it is corrupt" in holdfast.err
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


def test_copy_replaces_no_other_checkpoint_and_reports_a_fence(
    holdfast: Commands, folder: Path, tmp_path: Path, commit: Callable[..., Any]
) -> None:
    target = tmp_path / "other"
    commit(target, 20, {"model/a": b"other"})
    before = tree(target)

    assert holdfast("copy", folder / "step-20.g1.a1", target) == 3
    assert "another checkpoint named" in holdfast.err
    assert tree(target) == before

    write_claim(
        target,
        Claim(
            attempt_id=AttemptId(2, 1),
            job_uid="job-1",
            publication="p2",
            from_step=5,
            from_attempt_id=AttemptId(1, 1),
        ),
    )
    assert holdfast("copy", folder / "step-10.g1.a1", target) == 0
    assert "the job of that folder will not read step-10.g1.a1: fenced by claim 2.1" in holdfast.err


def test_fenced_checkpoints_are_copied_with_claims_or_by_name(
    holdfast: Commands, folder: Path, tmp_path: Path, commit: Callable[..., Any]
) -> None:
    """Other copies leave them out."""
    for attempt_id, step, before in ((AttemptId(1, 1), 0, None), (AttemptId(2, 1), 20, AttemptId(1, 1))):
        write_claim(
            folder,
            Claim(attempt_id=attempt_id, job_uid="job-1", publication="p1", from_step=step, from_attempt_id=before),
        )
    commit(folder, 25, FIRST, AttemptId(2, 1))
    commit(folder, 30, FIRST)  # of attempt 1.1, after its successor claimed
    late = "step-30.g1.a1"

    told = holdfast.json("copy", folder, tmp_path / "new")

    assert [one["commit"] for one in told["commits"]] == ["step-10.g1.a1", "step-20.g1.a1", "step-25.g2.a1"]
    assert told["notCopied"] == {late: f"fenced by claim 2.1 from step 20; pass {folder}/{late} to copy it"}
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
