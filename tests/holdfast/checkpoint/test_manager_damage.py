"""Corrupt checkpoints and unreachable copies: training does not start over."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from manager_runs import JOB, Run, commits

from holdfast.checkpoint.attempt_info import Attempt
from holdfast.checkpoint.folder.claims import list_claims, write_claim
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.stores import fallback
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints.main import main
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import NoCompleteCheckpointError, UnavailableError


def damage(root: Path) -> None:
    for shard in root.glob("step-*/rank-0.json"):
        shard.write_bytes(b"?" * shard.stat().st_size)


def entered(root: Path, copies: str = "", keep_last: int = 3) -> CheckpointManager:
    engine = CheckpointManager(
        root, keep_last=keep_last, resume=Resume.ALWAYS, on_foreign=lambda claims: None, copies=copies
    )
    engine.enter(Attempt(attempt_id=AttemptId(1, 2), job_uid=JOB, publication="p1", run_id="run"), SingleRank())
    return engine


def test_training_does_not_start_over_if_everything_is_corrupt(tmp_path: Path) -> None:
    Run(tmp_path, 1, 1).commits(10, 20)
    damage(tmp_path)
    before, claimed = commits(tmp_path), list_claims(tmp_path)

    for _ in range(2):  # a restart is no consent
        with pytest.raises(
            NoCompleteCheckpointError, match=r"step-20\.g1\.a1 .*step-10\.g1\.a1 .*verify.* --quarantine"
        ):
            entered(tmp_path).restore()

    assert commits(tmp_path) == before
    assert not (tmp_path / "quarantine").exists()
    assert list_claims(tmp_path) == claimed


def test_it_begins_anew_once_somebody_has_moved_the_damage_aside(tmp_path: Path) -> None:
    Run(tmp_path, 1, 1).commits(10, 20)
    damage(tmp_path)

    assert main(["verify", str(tmp_path), "--quarantine"]) == 1

    assert entered(tmp_path).restore().loaded is None
    assert len(list((tmp_path / "quarantine").glob("step-*/MANIFEST.json"))) == 2


def test_foreign_corruption_does_not_stop_a_job_not_resuming_it(tmp_path: Path) -> None:
    Run(tmp_path, 1, 1).commits(10)
    damage(tmp_path)
    fresh = Run(tmp_path, 2, 1, job="job-2", resume=Resume.NEVER, known=tuple(list_claims(tmp_path)))
    assert fresh.found.step == 0


def test_job_with_a_corrupt_first_checkpoint_starts_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The corrupt checkpoint is kept."""
    Run(tmp_path, 1, 1).commits(10)
    damage(tmp_path)
    found = entered(tmp_path).restore()
    assert "training starts from the beginning" in caplog.text
    assert (found.loaded, found.stuck) == (None, ())
    assert [bad.path for bad in found.lost] == ["step-10.g1.a1"]
    assert list((tmp_path / "quarantine").glob("*/rank-0.safetensors"))


def test_with_keep_last_1_one_corrupt_checkpoint_stops_the_job(tmp_path: Path) -> None:
    """Retention may have deleted many complete ones before it."""
    Run(tmp_path, 1, 1).commits(10)
    damage(tmp_path)
    with pytest.raises(NoCompleteCheckpointError):
        entered(tmp_path, keep_last=1).restore()
    assert not (tmp_path / "quarantine").exists()


def test_lasting_volume_error_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A soft mount whose server is away: no file can be read, and no folder can be renamed."""
    Run(tmp_path, 1, 1).commits(10, 20)

    def away(*_: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", away)
    monkeypatch.setattr(Path, "rename", away)
    with pytest.raises(NoCompleteCheckpointError):
        entered(tmp_path).restore()
    monkeypatch.undo()
    assert entered(tmp_path).restore().step == 20


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A store of copies with steps 10 and 20. It cannot be reached for this number of requests."""
    Run(tmp_path / "shared", 1, 1).commits(10, 20)
    shutil.copytree(tmp_path / "shared", tmp_path / "copies")
    times = [0]

    def opened(url: str, **_: object) -> FolderStore:
        times[0] -= 1
        if times[0] >= 0:
            raise UnavailableError("no network", cause="Network")
        return FolderStore(tmp_path / "copies")

    monkeypatch.setattr(fallback, "open_store", opened)
    return times


def test_briefly_absent_copies_are_asked_before_giving_up_a_step(tmp_path: Path, away: list[int]) -> None:
    damage(tmp_path / "shared")
    away[0] = 2
    assert entered(tmp_path / "shared", "s3://copies/job").restore().step == 20


@pytest.mark.parametrize("what", ["damaged", "fenced"])
def test_copies_that_stay_away_stop_a_job_that_has_nothing_else(tmp_path: Path, away: list[int], what: str) -> None:
    if what == "damaged":
        damage(tmp_path / "shared")
    else:  # the checkpoint on the volume is of a stale attempt, and the line that continued is lost
        for folder in (tmp_path / "shared").glob("step-*"):
            shutil.rmtree(folder)
        commit = tmp_path / "copies" / "step-20.g1.a1"
        shutil.copytree(commit, tmp_path / "shared" / commit.name)
        fence = Claim(
            attempt_id=AttemptId(1, 2), job_uid=JOB, publication="p1", from_step=10, from_attempt_id=AttemptId(1, 1)
        )
        write_claim(tmp_path / "shared", fence)
    before = commits(tmp_path / "shared")
    away[0] = 1000
    with pytest.raises(UnavailableError, match="no network") as refused:
        entered(tmp_path / "shared", "s3://copies/job").restore()
    assert refused.value.cause == "Network"
    assert commits(tmp_path / "shared") == before


def test_copies_that_stay_away_may_hold_what_is_corrupt_here(tmp_path: Path, away: list[int]) -> None:
    """To resume from 10 would fence the good copy of 20, and retention would delete that copy. Nothing is moved
    either."""
    newest = tmp_path / "shared" / "step-20.g1.a1" / "rank-0.json"
    newest.write_bytes(b"?")
    before = commits(tmp_path / "shared")
    for _ in range(2):
        away[0] = 1000
        with pytest.raises(UnavailableError, match="no network"):
            entered(tmp_path / "shared", "s3://copies/job").restore()
        assert commits(tmp_path / "shared") == before
    away[0] = 0
    assert entered(tmp_path / "shared", "s3://copies/job").restore().step == 20


def test_absent_copies_do_not_stop_a_job_with_a_good_newest_one(tmp_path: Path, away: list[int]) -> None:
    away[0] = 1000
    assert entered(tmp_path / "shared", "s3://copies/job").restore().step == 20


def test_absent_copies_may_hold_what_a_rolled_back_volume_had(tmp_path: Path, away: list[int]) -> None:
    shutil.rmtree(tmp_path / "shared" / "step-20.g1.a1")
    away[0] = 1000
    engine = entered(tmp_path / "shared", "s3://copies/job")
    engine.enter(replace(engine._fence.attempt, durable=20), SingleRank())
    with pytest.raises(UnavailableError, match="no network"):
        engine.restore()
    engine.enter(replace(engine._fence.attempt, durable=10), SingleRank())
    assert engine.restore().step == 10, "nothing newer was there"


def test_absent_copies_may_hold_what_the_last_attempt_continued(tmp_path: Path, away: list[int]) -> None:
    """The last attempt read its checkpoint from the copies, and the volume has only older ones."""
    write_claim(
        tmp_path / "shared",
        Claim(
            attempt_id=AttemptId(1, 2), job_uid=JOB, publication="p1", from_step=20, from_attempt_id=AttemptId(1, 1)
        ),
    )
    shutil.rmtree(tmp_path / "shared" / "step-20.g1.a1")
    away[0] = 1000
    with pytest.raises(UnavailableError, match="no network"):
        entered(tmp_path / "shared", "s3://copies/job").restore()
