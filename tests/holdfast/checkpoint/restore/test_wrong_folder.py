"""Restoring from another folder than the intended one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.checkpoint import load, save
from holdfast.checkpoint.folder import catalog
from holdfast.core.errors import UsageError


@pytest.fixture
def root(tmp_path: Path, commit: Callable[..., Any]) -> Path:
    """Two checkpoints."""
    commit(tmp_path / "runs" / "one", 1, {"w": b"bytes"})
    commit(tmp_path / "runs" / "one", 2, {"w": b"bytes"})
    return tmp_path / "runs" / "one"


@pytest.mark.parametrize(
    "use",
    [load, lambda path: save(path, step=3), lambda path: holdfast.init(checkpoint_dir=path)],
    ids=["load", "save", "init"],
)
def test_a_checkpoints_own_folder_is_refused_and_stays_as_it_was(root: Path, use: Callable[[Path], object]) -> None:
    own = root / "step-1.g1.a1"
    before = sorted(path.name for path in own.iterdir())
    with pytest.raises(UsageError, match=r"step-1\.g1\.a1 is a single checkpoint: pass its parent folder"):
        use(own)
    assert sorted(path.name for path in own.iterdir()) == before


def test_why_nothing_was_found_is_told(root: Path) -> None:
    above = root.parent
    assert catalog.what_is_wrong(root) == ""
    assert (
        catalog.what_is_wrong(above) == f"{above} holds no checkpoints, but its subfolders do: one. Pass one of them"
    )
    assert catalog.what_is_wrong(above / "two") == f"no such folder: {above / 'two'}"
    (above / "other" / "checkpoint-100").mkdir(parents=True)
    assert catalog.what_is_wrong(above / "other").endswith(
        "other holds no checkpoints of Holdfast, but checkpoint-100"
    )


@pytest.mark.parametrize("name", ["claims", "quarantine", "LATEST", ""])
def test_a_new_folder_of_a_job_is_none_of_these(tmp_path: Path, name: str) -> None:
    (tmp_path / "new" / name).mkdir(parents=True)
    assert catalog.what_is_wrong(tmp_path / "new") == ""
