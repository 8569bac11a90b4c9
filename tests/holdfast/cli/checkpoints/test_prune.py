"""`holdfast checkpoints prune`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from command_folders import MIB, flip, tree
from command_line import Commands

from holdfast.checkpoint.folder.upload_marker import held
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.core.attempt import AttemptId

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


def test_prune_keeps_uploads_in_progress_to_an_object_store(holdfast: Commands, folder: Path) -> None:
    with held(folder, CheckpointName(step=10, attempt_id=AttemptId(1, 1))):
        told = holdfast.json("prune", folder, "--keep-last", 1)["commits"]
    assert [(line["goes"], line["reason"]) for line in told] == [
        (False, "among the last 1"),
        (False, "being copied to the object store"),
    ]


def age(path: Path, hours: float) -> None:
    when = time.time() - 3600 * hours
    for one in (*path.iterdir(), path):
        os.utime(one, (when, when))


def test_prune_removes_day_old_remains_of_killed_operations(holdfast: Commands, folder: Path) -> None:
    """The operations are saves and deletions."""
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

    assert f"{old}: deleted, left by an interrupted save" in holdfast.out
    assert {path.name for path in folder.glob("step-*")} == {"step-20.g1.a1", paused, resumed}


def test_prune_counts_only_what_it_has_read_back_whole(holdfast: Commands, folder: Path) -> None:
    flip(folder / "step-20.g1.a1" / "rank-0.safetensors", 3 * MIB)
    before = tree(folder)

    told = holdfast.json("prune", folder, "--keep-last", 1, code=1)

    assert told["damaged"] == ["step-20.g1.a1"]
    assert not any(line["goes"] for line in told["commits"])
    assert tree(folder) == before
