"""A restore from several stores combines the intact files of the newest step, wherever they are."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.folder.claims import write_claim
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.ranks.exchange import Exchange, SingleRank
from holdfast.checkpoint.restore.search import Restored, restore
from holdfast.checkpoint.stores.folder import FolderSource, FolderStore
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import CheckpointError

OLD, NEW = {"a": b"old" * 50, "b": b"o"}, {"a": b"new" * 50, "b": b"n"}
NEWEST = "step-20.g1.a1"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 16
    path.write_bytes(data)


@pytest.fixture
def roots(tmp_path: Path, commit: Callable[..., Any]) -> list[Path]:
    """Two stores with the same two checkpoints."""
    commit(tmp_path / "first", 10, OLD)
    commit(tmp_path / "first", 20, NEW)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    return [tmp_path / "first", tmp_path / "second"]


def found(roots: list[Path], exchange: Exchange | None = None) -> Restored:
    return restore([FolderStore(root) for root in roots], exchange or SingleRank(), job_uid="job-1")


def test_the_first_store_is_used_and_named(roots: list[Path]) -> None:
    result = found(roots)
    assert (result.step, result.stores, result.quarantined, result.lost) == (20, (str(roots[0]),), (), ())


def test_a_newer_commit_wins_wherever_it_is(
    roots: list[Path], commit: Callable[..., Any], content: Callable[..., Any]
) -> None:
    commit(roots[1], 30, {"a": b"newer"})
    result = found(roots)
    assert (result.step, result.stores) == (30, (str(roots[1]),))
    assert result.loaded is not None
    assert content(result.loaded) == {"a": b"newer"}


@pytest.mark.parametrize("bad", list(product([False, True], repeat=4)), ids=str)
def test_a_step_is_restored_while_each_file_has_a_good_copy(
    roots: list[Path], content: Callable[..., Any], bad: tuple[bool, ...]
) -> None:
    files = [root / NEWEST / file for root in roots for file in ("rank-0.safetensors", "rank-0.json")]
    for file, is_bad in zip(files, bad, strict=True):
        if is_bad:
            flip(file)
    result = found(roots)
    whole = not (bad[0] and bad[2]) and not (bad[1] and bad[3])
    assert result.step == (20 if whole else 10)
    assert result.loaded is not None
    assert content(result.loaded) == (NEW if whole else OLD)
    assert [lost.path for lost in result.lost] == ([] if whole else [NEWEST])
    again = found(roots)
    assert again.step == result.step
    assert again.lost == ()


def test_copies_that_are_only_whole_together_stay_where_they_are(roots: list[Path]) -> None:
    flip(roots[0] / NEWEST / "rank-0.safetensors")
    flip(roots[1] / NEWEST / "rank-0.json")
    result = found(roots)
    assert (result.step, result.stores, result.quarantined) == (20, (str(roots[0]), str(roots[1])), ())
    assert all((root / NEWEST).is_dir() for root in roots)


def test_a_claim_in_any_store_fences_what_lies_in_the_others(roots: list[Path]) -> None:
    successor = Claim(
        attempt_id=AttemptId(2, 1), job_uid="job-1", publication="p2", from_step=10, from_attempt_id=AttemptId(1, 1)
    )
    write_claim(roots[1], successor)
    assert found(roots).step == 10


def test_unreachable_store_is_skipped_unless_it_is_the_only_one(
    roots: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = FolderStore.open

    def refused(store: FolderStore, name: CheckpointName, file: str) -> FolderSource:
        if store.url == str(roots[0]):
            raise CheckpointError(f"{store.url}: connection reset")
        return opened(store, name, file)

    monkeypatch.setattr(FolderStore, "open", refused)
    assert (found(roots).step, found(roots).stores) == (20, (str(roots[1]),))
    with pytest.raises(CheckpointError, match="connection reset"):
        found(roots[:1])
    assert (roots[0] / NEWEST).is_dir()


def node_stores(tmp_path: Path, world: Callable[..., list[Any]], commit_by: Callable[..., Any]) -> Path:
    """Step 20 on the disks of two nodes, each with the files of its own rank. Step 10 is in the shared store."""
    shared = tmp_path / "shared"
    for step, tensors in ((10, OLD), (20, NEW)):
        root = shared if step == 10 else tmp_path / "all"
        assert all(r.committed for r in world(2, lambda e, r=root, s=step, t=tensors: commit_by(e, r, s, t)))
    for rank in range(2):
        shutil.copytree(tmp_path / "all", tmp_path / f"node-{rank}")
        for path in (tmp_path / f"node-{rank}" / NEWEST).glob(f"rank-{1 - rank}.*"):
            path.unlink()
    return shared


def test_nodes_reading_each_others_disks_restore_a_split_state(
    tmp_path: Path, world: Callable[..., list[Any]], commit_by: Callable[..., Any], content: Callable[..., Any]
) -> None:
    """No node alone has the complete state."""
    shared = node_stores(tmp_path, world, commit_by)

    def read(exchange: Exchange) -> Restored:
        disks = [FolderStore(tmp_path / f"node-{(exchange.rank + i) % 2}", shared=False) for i in range(2)]
        return restore([*disks, FolderStore(shared)], exchange, job_uid="job-1")

    results = world(2, read)
    assert {(r.step, r.quarantined, r.lost) for r in results} == {(20, (), ())}
    assert [content(r.loaded) for r in results] == [NEW, NEW]


def test_loss_with_a_node_is_named_and_the_rest_is_not_corrupt(
    tmp_path: Path, world: Callable[..., list[Any]], commit_by: Callable[..., Any], content: Callable[..., Any]
) -> None:
    shared = node_stores(tmp_path, world, commit_by)

    def read(exchange: Exchange) -> Restored:
        own = FolderStore(tmp_path / f"node-{exchange.rank}", shared=False)
        return restore([own, FolderStore(shared)], exchange, job_uid="job-1")

    results = world(2, read)
    assert [(r.step, r.quarantined) for r in results] == [(10, ())] * 2
    assert [content(r.loaded) for r in results] == [OLD, OLD]
    assert [lost.path for lost in results[0].lost] == [NEWEST]
    assert results[0].lost == results[1].lost
    assert (tmp_path / "node-0" / NEWEST).is_dir()
