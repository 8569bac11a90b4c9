"""`holdfast checkpoints diff`."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from command_folders import FIRST, flip, offset_of, reseal
from command_line import Commands

from holdfast import checkpoint


class Box:
    """An object with a state."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        self._state = state


# diff


def test_diff_names_changes_and_its_exit_code_reports_them(
    holdfast: Commands, folder: Path, commit: Callable[..., Any]
) -> None:
    commit(folder, 30, {"model/a": FIRST["model/a"], "model/c": b"c", "model/new": b"n"})

    changed = holdfast.json("diff", folder / "step-10.g1.a1", folder / "step-20.g1.a1", code=1)
    moved = holdfast.json("diff", folder / "step-10.g1.a1", folder, code=1)

    assert (changed["changed"], changed["same"], changed["added"], changed["missing"]) == (["model/b"], 3, [], [])
    assert (moved["added"], moved["missing"]) == (["model/new"], ["model/b", "model/d"])
    assert (moved["shape"], moved["changed"], moved["same"]) == (["model/c"], [], 1)
    assert holdfast("diff", folder, folder / "step-30.g1.a1") == 0


def test_diff_finds_equal_tensors_in_different_layouts(
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


def test_diff_compares_mappings_by_key_and_reports_another_order(holdfast: Commands, tmp_path: Path) -> None:
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


def test_diff_takes_no_longer_for_a_manifest_with_a_huge_world(
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
