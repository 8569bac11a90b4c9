"""Which checkpoints a manager deletes, and which saves outlive their attempt."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from manager_runs import JOB, Run, commits
from nothing_managed import snapshot

from holdfast.checkpoint.attempt_info import Attempt, attempt_by_hand
from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.folder.claims import write_claim
from holdfast.checkpoint.folder.publish import begin, publish
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.shard_layout import Piece, TensorSpec
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.policy.retention import Rules
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints.main import main
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import ClaimError


def test_the_last_k_verified_commits_are_kept(tmp_path: Path) -> None:
    Run(tmp_path, 1, 1, keep_last=3).commits(10, 20, 30, 40, 50)
    assert commits(tmp_path) == {f"step-{step}.g1.a1" for step in (30, 40, 50)}


def test_rules_keep_more_than_the_last_ones(tmp_path: Path) -> None:
    Run(tmp_path, 1, 1, keep_last=1, rules=Rules.parse("every=20")).commits(10, 20, 30, 40, 50)
    assert commits(tmp_path) == {f"step-{step}.g1.a1" for step in (20, 40, 50)}


def test_older_attempts_expire_only_after_k_newer_are_verified(tmp_path: Path) -> None:
    Run(tmp_path, 1, 1, keep_last=3).commits(10, 20, 30)
    second = Run(tmp_path, 1, 2, keep_last=3).commits(40)
    assert len(commits(tmp_path)) == 4  # 30 was read back completely and 40 was written: only two are verified
    second.commits(50)
    assert commits(tmp_path) == {"step-30.g1.a1", "step-40.g1.a2", "step-50.g1.a2"}


def test_job_without_resume_deletes_nothing_of_the_previous_job(tmp_path: Path) -> None:
    old = {"step-80000.g1.a1", "step-90000.g1.a1"}
    Run(tmp_path, 1, 1).commits(80_000, 90_000)
    rules = Rules.parse("hours=24,every=10000")
    Run(tmp_path, 2, 1, job="job-2", resume=Resume.NEVER, keep_last=1, rules=rules).commits(10, 20)
    assert commits(tmp_path) >= old
    Run(tmp_path, 3, 1, job="job-3", keep_last=1).commits(30, 40)
    assert commits(tmp_path) == {*old, "step-40.g3.a1"}, "of the job that it resumes they are history of its own line"


def test_what_a_job_resumed_is_its_own_history(tmp_path: Path) -> None:
    Run(tmp_path, 1, 1).commits(10, 20)
    Run(tmp_path, 2, 1, job="job-2", keep_last=1).commits(30)
    assert commits(tmp_path) == {"step-30.g2.a1"}


def test_what_another_job_left_goes_only_when_somebody_says_so(tmp_path: Path) -> None:
    Run(tmp_path, 1, 1).commits(80_000)
    Run(tmp_path, 2, 1, job="job-2", resume=Resume.NEVER, keep_last=1).commits(10)
    assert main(["prune", str(tmp_path), "--keep-last", "1"]) == 0
    assert commits(tmp_path) == {"step-80000.g1.a1", "step-10.g2.a1"}
    assert main(["prune", str(tmp_path), "--keep-last", "1", "--others"]) == 0
    assert commits(tmp_path) == {"step-10.g2.a1"}


def test_fenced_commits_go_too(tmp_path: Path) -> None:
    zombie = Run(tmp_path, 1, 1, keep_last=2).commits(10)
    second = Run(tmp_path, 1, 2, keep_last=2)
    zombie.commits(500)
    second.commits(20)
    assert commits(tmp_path) == {"step-10.g1.a1", "step-20.g1.a2"}


def test_stale_attempt_never_deletes_the_base_of_its_successor(tmp_path: Path) -> None:
    zombie = Run(tmp_path, 1, 1, keep_last=1).commits(10)
    Run(tmp_path, 1, 2)
    zombie.commits(20, 30, 40)
    assert Run(tmp_path, 1, 3).found.step == 10


def test_retention_leaves_alone_what_this_release_cannot_read(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, 1, keep_last=1).commits(10)
    manifest = tmp_path / "step-10.g1.a1" / "MANIFEST.json"
    manifest.write_bytes(b'{"format": "tape"}')
    run.commits(20, 30)
    assert commits(tmp_path) == {"step-10.g1.a1", "step-30.g1.a1"}


def test_leftovers_of_higher_attempts_are_not_touched(tmp_path: Path) -> None:
    for name in ("step-5.g1.a1.tmp-" + "a" * 32, "step-5.g1.a9.tmp-" + "b" * 32):
        (tmp_path / name).mkdir(parents=True)
    Run(tmp_path, 1, 2)
    assert [path.name for path in tmp_path.iterdir() if ".tmp-" in path.name] == ["step-5.g1.a9.tmp-" + "b" * 32]


def test_by_hand_each_start_is_a_generation_of_its_own(tmp_path: Path) -> None:
    first = attempt_by_hand(FolderStore(tmp_path), SingleRank())
    assert first.attempt_id == AttemptId(1, 1)
    Run(tmp_path, 1, 1, job=first.job_uid)
    second = attempt_by_hand(FolderStore(tmp_path), SingleRank())
    assert second.attempt_id == AttemptId(2, 1)
    assert [claim.attempt_id for claim in second.known] == [AttemptId(1, 1)]


def test_every_rank_of_a_world_learns_of_a_foreign_claim(tmp_path: Path, world: Callable[..., Any]) -> None:
    write_claim(tmp_path, Claim(attempt_id=AttemptId(2, 1), job_uid="other", publication="x", from_step=0))
    attempt = Attempt(attempt_id=AttemptId(1, 1), job_uid=JOB, publication="p1", run_id="run")

    def start(exchange: Any) -> str:
        engine = CheckpointManager(tmp_path, keep_last=3, resume=Resume.ALWAYS, on_foreign=lambda claims: None)
        engine.enter(attempt, exchange)
        with pytest.raises(ClaimError) as raised:
            engine.restore()
        return str(raised.value)

    assert len(set(world(3, start))) == 1


def test_late_save_is_never_half_published_after_cleanup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The successor cleans up when the old attempt publishes."""
    zombie = Run(tmp_path, 1, 1)
    published: list[bool] = []
    rmtree = shutil.rmtree

    def meanwhile(path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            publish(tmp_path, staging, manifest)
        published.append(False)
        rmtree(path)

    staging = begin(tmp_path, CheckpointName(step=20, attempt_id=zombie.attempt_id))
    zombie.commits(10)
    manifest = replace(
        catalog.read_manifest(tmp_path, CheckpointName(step=10, attempt_id=zombie.attempt_id)), step=20
    )
    monkeypatch.setattr(shutil, "rmtree", meanwhile)
    Run(tmp_path, 1, 2)
    assert published == [False]
    assert commits(tmp_path) == {"step-10.g1.a1"}


# Content of a save


def test_state_that_cannot_be_copied_fails_its_save_only(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, 1).commits(10)

    def gone(piece: Piece) -> bytes:
        raise RuntimeError("the device is gone")

    spec = TensorSpec(name="w", dtype="U8", shape=(4,))
    with pytest.raises(RuntimeError, match="the device is gone"):
        run.engine.begin(replace(snapshot(20, run.attempt_id), specs=[spec], read=gone))
    run.commits(30)
    assert commits(tmp_path) == {"step-10.g1.a1", "step-30.g1.a1"}
    assert not [path.name for path in tmp_path.iterdir() if ".tmp-" in path.name]


def test_what_was_committed_here_is_not_read_again_for_retention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, 1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, "manifest", lambda *unread: pytest.fail("a manifest was read"))
        run.commits(10, 20, 30, 40)
    assert commits(tmp_path) == {"step-20.g1.a1", "step-30.g1.a1", "step-40.g1.a1"}
