"""What an attempt resumes from, and how long that checkpoint stays readable."""

from __future__ import annotations

from pathlib import Path

import pytest
from manager_runs import JOB, Run, commits

from holdfast.checkpoint.attempt_info import Attempt
from holdfast.checkpoint.folder.claims import list_claims, write_claim
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.stores.fallback import FallbackStore
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import ClaimError, UnavailableError


@pytest.fixture
def lost_volume(tmp_path: Path) -> CheckpointManager:
    """An attempt with an empty shared tier and a copy of step 10."""
    Run(tmp_path / "shared", 1, 1).commits(10)
    (tmp_path / "shared").rename(tmp_path / "copies")
    engine = CheckpointManager(
        tmp_path / "shared",
        keep_last=3,
        resume=Resume.ALWAYS,
        on_foreign=lambda claims: None,
        copies=f"file://{tmp_path / 'copies'}",
    )
    engine.enter(Attempt(attempt_id=AttemptId(1, 2), job_uid=JOB, publication="p1", run_id="run"), SingleRank())
    return engine


def test_newest_copy_is_restored_when_the_shared_tier_lost_all(lost_volume: CheckpointManager) -> None:
    assert lost_volume.newest() == CheckpointName(step=10, attempt_id=AttemptId(1, 1))


def test_unreachable_copies_do_not_delay_a_restore_from_memory(
    lost_volume: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(self: FallbackStore) -> tuple[Claim, ...]:
        raise UnavailableError("no network", cause="Network")

    monkeypatch.setattr(FallbackStore, "claims", unreachable)
    assert lost_volume.newest() is None


def test_store_answering_only_some_requests_ends_the_restore(
    lost_volume: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaves_out(self: FallbackStore, ask: object) -> tuple[()]:
        self._left_out = True
        return ()

    monkeypatch.setattr(FallbackStore, "_found", leaves_out)
    with pytest.raises(UnavailableError, match="Nothing was moved or deleted"):
        lost_volume.restore()


def test_attempt_resumes_from_and_claims_the_newest_checkpoint(tmp_path: Path) -> None:
    Run(tmp_path, 1, 1).commits(10, 20)
    second = Run(tmp_path, 1, 2)
    assert second.found.step == 20
    assert second.claim == Claim(
        attempt_id=AttemptId(1, 2), job_uid=JOB, publication="p1", from_step=20, from_attempt_id=AttemptId(1, 1)
    )
    assert list_claims(tmp_path)[-1] == second.claim


def test_checkpoints_of_an_heir_are_kept_and_expire_normally(tmp_path: Path) -> None:
    """An attempt that continues from memory in its generation writes no claim, and its checkpoints belong to the
    job."""
    run = Run(tmp_path, 1, 1).commits(10, 20, 30)
    heir = Attempt(attempt_id=AttemptId(1, 2), job_uid=JOB, publication="p1", run_id="run")
    run.engine.enter(heir, SingleRank())
    run.attempt_id = heir.attempt_id
    run.commits(40, 50, 60)
    assert commits(tmp_path) == {"step-40.g1.a2", "step-50.g1.a2", "step-60.g1.a2"}
    successor = Run(tmp_path, 2, 1, known=tuple(list_claims(tmp_path))).commits(70, 80)
    assert commits(tmp_path) >= {"step-60.g1.a2"}
    successor.commits(90)
    assert commits(tmp_path) == {"step-70.g2.a1", "step-80.g2.a1", "step-90.g2.a1"}


def test_checkpoint_of_a_stale_attempt_is_never_read(tmp_path: Path) -> None:
    """The stale attempt publishes after its successor has claimed."""
    zombie = Run(tmp_path, 1, 1).commits(10)
    Run(tmp_path, 1, 2)
    zombie.commits(20, 30)
    third = Run(tmp_path, 1, 3)
    assert third.found.step == 10
    assert third.found.attempt_id == AttemptId(1, 1)


@pytest.mark.parametrize(("before", "step"), [(None, 30), (31, 30), (30, 20), (11, 10), (10, None)])
def test_restore_before_a_step_passes_over_newer_checkpoints(
    tmp_path: Path, before: int | None, step: int | None
) -> None:
    Run(tmp_path, 1, 1).commits(10, 20, 30)
    engine = Run(tmp_path, 1, 2).engine
    found = engine.restore(before=before)
    assert (None if found.loaded is None else found.step) == step
    assert commits(tmp_path) == {"step-10.g1.a1", "step-20.g1.a1", "step-30.g1.a1"}, "none is moved"


@pytest.mark.parametrize("when", ["before the claim", "while the claim is written"])
def test_base_deleted_by_a_stale_attempt_leaves_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The next attempt starts from what the stale attempt saved."""
    zombie = Run(tmp_path, 1, 1, keep_last=1).commits(10)
    engine = CheckpointManager(tmp_path, keep_last=1, resume=Resume.ALWAYS, on_foreign=lambda claims: None)
    engine.enter(Attempt(attempt_id=AttemptId(1, 2), job_uid=JOB, publication="p1", run_id="run"), SingleRank())
    found = engine.restore()

    def late(root: Path, claim: Claim, *, again: bool) -> None:
        zombie.commits(20)
        write_claim(root, claim, again=again)

    if when == "before the claim":
        zombie.commits(20)
    else:
        monkeypatch.setattr("holdfast.checkpoint.stores.folder.write_claim", late)
    with pytest.raises(ClaimError, match=r"step-10\.g1\.a1 .* was deleted after this attempt read it"):
        engine.claim(step=found.step, attempt_id=found.attempt_id)
    assert [claim.attempt_id for claim in list_claims(tmp_path)] == [AttemptId(1, 1)]
    monkeypatch.undo()
    assert Run(tmp_path, 1, 3).found.step == 20


def test_a_zombies_commit_of_a_step_does_not_stop_the_successors(tmp_path: Path) -> None:
    zombie = Run(tmp_path, 1, 1).commits(10)
    successor = Run(tmp_path, 1, 2)
    zombie.commits(20)
    successor.commits(20)
    assert Run(tmp_path, 1, 3).found.attempt_id == AttemptId(1, 2)
