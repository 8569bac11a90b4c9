"""Retention deletes a checkpoint while it is read: the checkpoint is not corrupt, and a newer one is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from holdfast.checkpoint.dcp.reader import StorageReader
from holdfast.checkpoint.dcp.writer import StorageWriter
from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.ranks.exchange import Exchange, SingleRank
from holdfast.checkpoint.restore.search import Restored, restore
from holdfast.checkpoint.stores.folder import FolderSource, FolderStore
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import CheckpointError

Commit = Callable[..., Any]


def read(root: Path, exchange: Exchange) -> Restored:
    return restore(root, exchange, job_uid="job-1", without_job=True)


@pytest.fixture
def slow(tmp_path: Path, commit: Commit, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Before a file of an existing step is opened, the job saves a newer step and deletes all others."""
    steps: list[int] = []
    opened, one_rank = FolderStore.open, Lock()

    def late(store: FolderStore, name: CheckpointName, file: str) -> FolderSource:
        with one_rank:
            if name.step in steps:
                steps.remove(name.step)
                commit(tmp_path, name.step + 10, {"a": b"newer"})
                catalog.delete(tmp_path, [one for one in catalog.list_commits(tmp_path) if one.step <= name.step])
        return opened(store, name, file)

    monkeypatch.setattr(FolderStore, "open", late)
    return steps


def test_newest_checkpoint_is_searched_again_and_none_is_lost(
    tmp_path: Path, commit: Commit, content: Callable[..., Any], world: Callable[..., list[Any]], slow: list[int]
) -> None:
    commit(tmp_path, 10, {"a": b"old"})
    commit(tmp_path, 20, {"a": b"new"})
    slow.append(20)
    for found in world(2, lambda exchange: read(tmp_path, exchange)):
        assert (found.step, found.lost, found.quarantined, found.stuck) == (30, (), (), ())
        assert content(found.loaded) == {"a": b"newer"}
    assert not (tmp_path / "quarantine").exists()


def test_a_manifest_that_is_gone_when_it_is_read_was_deleted_too(
    tmp_path: Path, commit: Commit, world: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, 10, {"a": b"old"})
    listed = FolderStore.commits

    def then_deleted(store: FolderStore) -> tuple[CheckpointName, ...]:
        names = listed(store)
        if {name.step for name in names} == {10}:
            commit(tmp_path, 20, {"a": b"new"})
            catalog.delete(tmp_path, names)
        return names

    monkeypatch.setattr(FolderStore, "commits", then_deleted)
    found = world(2, lambda exchange: read(tmp_path, exchange))
    assert [(one.step, one.lost) for one in found] == [(20, ())] * 2


def test_job_deleting_faster_than_reads_is_reported(tmp_path: Path, commit: Commit, slow: list[int]) -> None:
    commit(tmp_path, 10, {"a": b"old"})
    slow.extend(range(10, 1000, 10))
    with pytest.raises(
        CheckpointError, match=r"deleted while they were read.* Keep more checkpoints .*\(keep_last"
    ) as ended:
        read(tmp_path, SingleRank())
    assert "step-10.g1.a1" in str(ended.value)


def test_missing_file_of_an_existing_checkpoint_is_corruption(
    tmp_path: Path, commit: Commit, world: Callable[..., list[Any]]
) -> None:
    commit(tmp_path, 10, {"a": b"old"})
    commit(tmp_path, 20, {"a": b"new"})
    name = CheckpointName(step=20, attempt_id=AttemptId(1, 1))
    (tmp_path / str(name) / "rank-0.safetensors").unlink()
    for found in world(2, lambda exchange: read(tmp_path, exchange)):
        assert (found.step, [one.path for one in found.lost]) == (10, [str(name)])


def test_a_load_through_dcp_says_that_its_checkpoint_was_deleted(tmp_path: Path, slow: list[int]) -> None:
    state = {"w": torch.zeros(4)}
    dcp.save(state, storage_writer=StorageWriter(tmp_path, step=20), no_dist=True)
    slow.append(20)
    with pytest.raises(
        CheckpointException, match=r"step-20\.g0\.a1 was deleted from .* while it was read. It is not"
    ):
        dcp.load(state, storage_reader=StorageReader(tmp_path), no_dist=True)
