"""A URL in place of a folder is refused, and no folder with that name is created."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import checkpoint
from holdfast.checkpoint.dcp.reader import StorageReader
from holdfast.checkpoint.dcp.writer import StorageWriter
from holdfast.checkpoint.stores.open import open_store
from holdfast.cli.checkpoints.main import main
from holdfast.core.environment import read_environment
from holdfast.core.errors import UsageError
from holdfast.core.paths import local_path

TAKERS: dict[str, Callable[[str], object]] = {
    "save": lambda where: checkpoint.save(where, step=1, model=torch.nn.Linear(1, 1)),
    "load": lambda where: checkpoint.load(where, model=torch.nn.Linear(1, 1)),
    "init with a path": lambda where: holdfast.init(checkpoint_dir=Path(where)),
    "StorageWriter": lambda where: StorageWriter(where, step=1),
    "StorageWriter's checkpoint_id": lambda where: StorageWriter("ckpt").reset(f"{where}/step-1"),
    "StorageReader": StorageReader,
    "StorageReader's checkpoint_id": lambda where: StorageReader("ckpt").reset(f"{where}/step-1"),
}


@pytest.mark.parametrize("where", ["s3://bucket/a", "file:///b", "s3:/bucket/a", "~/c"])
@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS.keys())
def test_a_folder_is_no_url(
    take: Callable[[str], object], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"nothing was read or written: (expected a path|pass the complete path)"):
        take(where)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["file:///b", "s3:/bucket/a", "~/c"])
def test_a_jobs_checkpoints_are_in_a_folder_or_an_object_store(where: str) -> None:
    for take in (
        lambda: holdfast.init(checkpoint_dir=where),
        lambda: read_environment({"HOLDFAST_CHECKPOINT_DIR": where}),
    ):
        with pytest.raises(UsageError, match="nothing was read or written"):
            take()
    assert read_environment({"HOLDFAST_CHECKPOINT_DIR": "s3://bucket/a/"}).checkpoint_dir == "s3://bucket/a"


def test_a_url_that_lost_a_slash_is_no_store_of_commits() -> None:
    with pytest.raises(UsageError, match="'s3:/bucket/a' is a URL"):
        open_store("s3:/bucket/a")


def test_the_command_exports_to_no_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(tmp_path / "a", step=1, model=torch.nn.Linear(1, 1))
    monkeypatch.chdir(tmp_path)
    assert main(["export", "a", "s3://bucket/w.safetensors"]) == 2
    assert "'s3://bucket/w.safetensors' is a URL, and nothing was read or written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("path", ["a", "/a/b", "a/s3:/b", "./s3:/b", "~a", "a/~/b", "step:1"])
def test_whatever_else_is_a_path(path: str) -> None:
    assert local_path(path) == Path(path)
