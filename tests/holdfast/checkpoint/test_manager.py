"""One attempt's checkpoints: it claims before it commits, reads only its own line, and keeps what is needed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nothing_managed import snapshot

from holdfast.checkpoint.attempt_info import Attempt, attempt_by_hand
from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.folder import claims as claims_module
from holdfast.checkpoint.folder.claims import list_claims, write_claim
from holdfast.checkpoint.folder.publish import begin, publish
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.shard_layout import Piece, TensorSpec
from holdfast.checkpoint.io.durable_files import RIGHT
from holdfast.checkpoint.manager import NO_RULES, CheckpointManager
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.policy.retention import Rules
from holdfast.checkpoint.ranks.exchange import Alone
from holdfast.checkpoint.stores import fallback
from holdfast.checkpoint.stores.fallback import FallbackStore
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints.main import main
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import ClaimError, NoneWholeError, UnavailableError

JOB = "job-1"


class Run:
    """An attempt that restored and claimed."""

    def __init__(
        self,
        root: Path,
        generation: int,
        attempt: int,
        *,
        known: tuple[Claim, ...] = (),
        job: str = JOB,
        keep_last: int = 3,
        resume: Resume = Resume.ALWAYS,
        rules: Rules = NO_RULES,
    ) -> None:
        self.pair = AttemptId(generation, attempt)
        self.foreign: list[Claim] = []
        attempt = Attempt(pair=self.pair, job_uid=job, publication=f"p{generation}", run_id="run", known=known)
        self.engine = CheckpointManager(
            root, keep_last=keep_last, resume=resume, on_foreign=self.foreign.extend, rules=rules
        )
        self.engine.enter(attempt, Alone())
        self.found = self.engine.restore()
        self.claim = self.engine.claim(step=self.found.step, pair=self.found.pair)

    def commits(self, *steps: int) -> Run:
        for step in steps:
            assert self.engine.save(snapshot(step, self.pair)).committed
        return self


def commits(root: Path) -> set[str]:
    return {str(name) for name in catalog.list_commits(root)}


@pytest.fixture
def lost_volume(tmp_path: Path) -> CheckpointManager:
    """An attempt whose shared tier is empty, while a copy of it has step 10."""
    Run(tmp_path / "shared", 1, 1).commits(10)
    (tmp_path / "shared").rename(tmp_path / "copies")
    engine = CheckpointManager(
        tmp_path / "shared",
        keep_last=3,
        resume=Resume.ALWAYS,
        on_foreign=lambda claims: None,
        copies=f"file://{tmp_path / 'copies'}",
    )
    engine.enter(Attempt(pair=AttemptId(1, 2), job_uid=JOB, publication="p1", run_id="run"), Alone())
    return engine


def test_where_the_shared_tier_has_lost_all_the_newest_is_that_of_the_copies(lost_volume: CheckpointManager) -> None:
    assert lost_volume.newest() == CheckpointName(step=10, pair=AttemptId(1, 1))


def test_copies_out_of_reach_do_not_hold_up_who_goes_on_from_memory(
    lost_volume: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(self: FallbackStore) -> tuple[Claim, ...]:
        raise UnavailableError("no network", cause="Network")

    monkeypatch.setattr(FallbackStore, "claims", unreachable)
    assert lost_volume.newest() is None


def test_a_store_that_answers_only_some_requests_ends_the_restore(
    lost_volume: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaves_out(self: FallbackStore, ask: object) -> tuple[()]:
        self._left_out = True
        return ()

    monkeypatch.setattr(FallbackStore, "_asked", leaves_out)
    with pytest.raises(UnavailableError, match="nothing was moved or deleted"):
        lost_volume.restore()


def test_an_attempt_goes_on_from_the_newest_commit_and_its_claim_says_so(tmp_path: Path) -> None:
    Run(tmp_path, 1, 1).commits(10, 20)
    second = Run(tmp_path, 1, 2)
    assert second.found.step == 20
    assert second.claim == Claim(
        pair=AttemptId(1, 2), job_uid=JOB, publication="p1", from_step=20, from_pair=AttemptId(1, 1)
    )
    assert list_claims(tmp_path)[-1] == second.claim


def test_commits_of_an_attempt_that_inherited_its_claim_are_kept_and_expire_like_others(tmp_path: Path) -> None:
    """An attempt that goes on from memory in its generation writes no claim, and its commits are the job's own."""
    run = Run(tmp_path, 1, 1).commits(10, 20, 30)
    heir = Attempt(pair=AttemptId(1, 2), job_uid=JOB, publication="p1", run_id="run")
    run.engine.enter(heir, Alone())
    run.pair = heir.pair
    run.commits(40, 50, 60)
    assert commits(tmp_path) == {"step-40.g1.a2", "step-50.g1.a2", "step-60.g1.a2"}
    successor = Run(tmp_path, 2, 1, known=tuple(list_claims(tmp_path))).commits(70, 80)
    assert commits(tmp_path) >= {"step-60.g1.a2"}
    successor.commits(90)
    assert commits(tmp_path) == {"step-70.g2.a1", "step-80.g2.a1", "step-90.g2.a1"}


def test_what_a_zombie_commits_after_its_successor_claimed_is_never_read(tmp_path: Path) -> None:
    zombie = Run(tmp_path, 1, 1).commits(10)
    Run(tmp_path, 1, 2)
    zombie.commits(20, 30)
    third = Run(tmp_path, 1, 3)
    assert third.found.step == 10
    assert third.found.pair == AttemptId(1, 1)


@pytest.mark.parametrize("when", ["before the claim", "while the claim is written"])
def test_a_base_that_a_zombie_deletes_leaves_no_claim_and_the_next_attempt_starts_from_what_it_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    zombie = Run(tmp_path, 1, 1, keep_last=1).commits(10)
    engine = CheckpointManager(tmp_path, keep_last=1, resume=Resume.ALWAYS, on_foreign=lambda claims: None)
    engine.enter(Attempt(pair=AttemptId(1, 2), job_uid=JOB, publication="p1", run_id="run"), Alone())
    found = engine.restore()

    def late(root: Path, claim: Claim, *, again: bool) -> None:
        zombie.commits(20)
        write_claim(root, claim, again=again)

    if when == "before the claim":
        zombie.commits(20)
    else:
        monkeypatch.setattr("holdfast.checkpoint.fence.write_claim", late)
    with pytest.raises(ClaimError, match=r"step-10\.g1\.a1 .* was deleted after this attempt read it"):
        engine.claim(step=found.step, pair=found.pair)
    assert [claim.pair for claim in list_claims(tmp_path)] == [AttemptId(1, 1)]
    monkeypatch.undo()
    assert Run(tmp_path, 1, 3).found.step == 20


def test_a_zombies_commit_of_a_step_does_not_stop_the_successors(tmp_path: Path) -> None:
    zombie = Run(tmp_path, 1, 1).commits(10)
    successor = Run(tmp_path, 1, 2)
    zombie.commits(20)
    successor.commits(20)
    assert Run(tmp_path, 1, 3).found.pair == AttemptId(1, 2)


def test_attempts_that_fail_before_they_commit_leave_one_claim_and_cut_off_as_much(tmp_path: Path) -> None:
    zombie = Run(tmp_path, 1, 1).commits(10)
    for attempt in range(2, 6):
        Run(tmp_path, 1, attempt)
    assert [claim.pair.attempt for claim in list_claims(tmp_path)] == [1, 5]
    zombie.commits(20)
    assert Run(tmp_path, 2, 1).found.step == 10


def test_a_claim_that_is_removed_while_claims_are_listed_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run(tmp_path, 1, 1).commits(10)
    Run(tmp_path, 1, 2)
    read, successors = claims_module._read, [3]

    def meanwhile(path: Path, pair: AttemptId) -> Claim:
        if pair == AttemptId(1, 2) and successors:
            Run(tmp_path, 1, successors.pop())
        return read(path, pair)

    monkeypatch.setattr(claims_module, "_read", meanwhile)
    assert [claim.pair.attempt for claim in list_claims(tmp_path)] == [1, 3]


def test_two_processes_cannot_claim_one_attempt(tmp_path: Path) -> None:
    Run(tmp_path, 1, 1)
    with pytest.raises(ClaimError, match=r"another process has claimed attempt 1\.1"):
        Run(tmp_path, 1, 1)


def test_a_claim_that_was_written_and_not_synced_is_ours_at_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = Run(tmp_path, 1, 1).claim
    later = replace(claim, pair=AttemptId(2, 1), publication="p2")

    def fails(folder: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))

    with monkeypatch.context() as patch:
        patch.setattr(claims_module, "sync_folder", fails)
        with pytest.raises(ClaimError, match="cannot write"):
            write_claim(tmp_path, later)
    write_claim(tmp_path, later, again=True)
    assert list_claims(tmp_path) == (claim, later)
    with pytest.raises(ClaimError, match=r"another process has claimed attempt 2\.1"):
        write_claim(tmp_path, replace(later, publication="p3"), again=True)


def test_a_claim_that_was_made_and_not_answered_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network's file system does it: the request is sent again, and the second one finds the name taken."""
    link = os.link

    def twice(*names: Path) -> None:
        link(*names)
        link(*names)

    monkeypatch.setattr(os, "link", twice)
    claim = Run(tmp_path, 1, 1).claim
    assert list_claims(tmp_path) == (claim,)


@pytest.fixture(params=[errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
def no_links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file share without hard links."""

    def refuses(source: Path, target: Path) -> None:
        raise OSError(request.param, os.strerror(request.param), str(target))

    monkeypatch.setattr(os, "link", refuses)


@pytest.mark.usefixtures("no_links")
def test_without_hard_links_one_attempt_has_one_claim(tmp_path: Path) -> None:
    first = Run(tmp_path, 1, 1).commits(10)
    with pytest.raises(ClaimError, match=r"another process has claimed attempt 1\.1"):
        write_claim(tmp_path, replace(first.claim, publication="p2"))
    assert list_claims(tmp_path) == (first.claim,)
    assert Run(tmp_path, 1, 2).found.step == 10
    assert sorted(path.name for path in (tmp_path / "claims").iterdir()) == ["1.1.json", "1.2.json"]


@pytest.mark.usefixtures("no_links")
def test_without_hard_links_a_claimant_that_was_killed_leaves_no_claim_and_the_next_attempt_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run(tmp_path, 1, 1).commits(10)
    (tmp_path / "claims" / f"1.2.json{RIGHT}").touch()
    with pytest.raises(ClaimError, match=r"another process has claimed attempt 1\.2"):
        Run(tmp_path, 1, 2)
    assert Run(tmp_path, 1, 3).found.step == 10
    assert sorted(path.name for path in (tmp_path / "claims").iterdir()) == ["1.1.json", "1.3.json"]


@pytest.mark.usefixtures("no_links")
def test_without_hard_links_a_claimant_by_hand_that_was_killed_keeps_no_later_one_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No operator or launcher counts attempts there: the folder alone says which name is free."""
    attempt = attempt_by_hand(tmp_path, Alone())
    claim = Claim(pair=attempt.pair, job_uid=attempt.job_uid, publication=attempt.publication, from_step=0)
    claimant = os.fork()
    if claimant == 0:
        monkeypatch.setattr(Path, "rename", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        write_claim(tmp_path, claim)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(claimant, 0)[1]) == -signal.SIGKILL
    assert list_claims(tmp_path) == ()
    second = attempt_by_hand(tmp_path, Alone())
    run = Run(tmp_path, second.pair.generation, second.pair.attempt, job=second.job_uid)
    assert sorted(path.name for path in (tmp_path / "claims").iterdir()) == [f"{run.pair}.json"]


@pytest.mark.usefixtures("no_links")
def test_without_hard_links_a_name_that_another_host_took_at_the_same_moment_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def overtaken(source: Path, target: Path) -> Path:
        moved = rename(source, target)
        if target.name == "1.1.json":
            target.write_bytes(b"another host's")
        return moved

    monkeypatch.setattr(Path, "rename", overtaken)
    with pytest.raises(ClaimError, match=r"another process has claimed attempt 1\.1"):
        write_claim(tmp_path, Claim(pair=AttemptId(1, 1), job_uid=JOB, publication="p1", from_step=0))


@pytest.mark.parametrize(("number", "saves"), [(errno.EINVAL, True), (errno.ENOSYS, True), (errno.EIO, False)])
def test_a_volume_that_knows_no_fsync_of_folders_saves_and_one_on_which_it_fails_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, saves: bool
) -> None:
    run, fsync = Run(tmp_path, 1, 1), os.fsync

    def refuses(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuses)
    assert run.engine.save(snapshot(10, run.pair)).committed is saves
    monkeypatch.undo()
    assert Run(tmp_path, 1, 2).found.step == (10 if saves else 0)


def test_another_jobs_claim_stops_the_attempt_before_it_writes(tmp_path: Path) -> None:
    Run(tmp_path, 3, 1, job="other").commits(10)
    before = sorted(path.name for path in (tmp_path / "claims").iterdir())
    with pytest.raises(ClaimError, match=r"3\.1 of job other.*give each job a folder of its own"):
        Run(tmp_path, 1, 1)
    assert sorted(path.name for path in (tmp_path / "claims").iterdir()) == before


def test_a_job_applied_again_on_an_old_folder_resumes_it_once_the_operator_knows_its_claims(tmp_path: Path) -> None:
    old = Run(tmp_path, 3, 1, job="other").commits(10)
    again = Run(tmp_path, 4, 1, known=(old.claim,))
    assert (again.found.step, again.found.pair) == (10, AttemptId(3, 1))


def test_resume_never_starts_at_0_and_later_attempts_of_the_job_resume_its_own(tmp_path: Path) -> None:
    old = Run(tmp_path, 3, 1, job="other").commits(10)
    known = (old.claim,)
    first = Run(tmp_path, 4, 1, known=known, resume=Resume.NEVER)
    assert (first.found.step, first.claim.from_pair) == (0, None)
    first.commits(5)
    assert Run(tmp_path, 4, 2, known=known, resume=Resume.NEVER).found.pair == AttemptId(4, 1)


@pytest.mark.parametrize("pair", [AttemptId(2, 1), AttemptId(1, 1)], ids=["above ours", "under our name"])
def test_a_claim_that_appears_while_ours_is_written_stops_the_attempt(tmp_path: Path, pair: AttemptId) -> None:
    """The look after the claim: whoever writes second sees the first."""
    attempt = Attempt(pair=AttemptId(1, 1), job_uid=JOB, publication="p1", run_id="run")
    reported: list[Claim] = []
    engine = CheckpointManager(tmp_path, keep_last=3, resume=Resume.ALWAYS, on_foreign=reported.extend)
    engine.enter(attempt, Alone())
    found = engine.restore()
    other = Claim(pair=pair, job_uid="other", publication="x", from_step=0)
    write_claim(tmp_path, other)
    with pytest.raises(ClaimError, match="another job or operator uses the folder"):
        engine.claim(step=found.step, pair=found.pair)
    assert reported == [other]


def test_a_claim_that_cannot_be_read_is_not_overlooked(tmp_path: Path) -> None:
    Run(tmp_path, 1, 1).commits(10)
    path = tmp_path / "claims" / "1.1.json"
    for text in ("", '{"version": 2}', json.dumps(replace(list_claims(tmp_path)[0], pair=AttemptId(9, 9)).to_json())):
        path.write_text(text)
        with pytest.raises(ClaimError, match="put the file back as it was"):
            Run(tmp_path, 1, 2)


def test_the_last_k_verified_commits_are_kept(tmp_path: Path) -> None:
    Run(tmp_path, 1, 1, keep_last=3).commits(10, 20, 30, 40, 50)
    assert commits(tmp_path) == {f"step-{step}.g1.a1" for step in (30, 40, 50)}


def test_rules_keep_more_than_the_last_ones(tmp_path: Path) -> None:
    Run(tmp_path, 1, 1, keep_last=1, rules=Rules.parse("every=20")).commits(10, 20, 30, 40, 50)
    assert commits(tmp_path) == {f"step-{step}.g1.a1" for step in (20, 40, 50)}


def test_older_attempts_commits_go_only_when_k_newer_ones_are_verified(tmp_path: Path) -> None:
    Run(tmp_path, 1, 1, keep_last=3).commits(10, 20, 30)
    second = Run(tmp_path, 1, 2, keep_last=3).commits(40)
    assert len(commits(tmp_path)) == 4  # 30 was read back whole and 40 written: only two are verified
    second.commits(50)
    assert commits(tmp_path) == {"step-30.g1.a1", "step-40.g1.a2", "step-50.g1.a2"}


def test_a_job_that_does_not_resume_deletes_nothing_of_the_job_before_it(tmp_path: Path) -> None:
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


def test_a_zombies_retention_never_takes_the_commit_on_which_its_successor_stands(tmp_path: Path) -> None:
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
    first = attempt_by_hand(tmp_path, Alone())
    assert first.pair == AttemptId(1, 1)
    Run(tmp_path, 1, 1, job=first.job_uid)
    second = attempt_by_hand(tmp_path, Alone())
    assert second.pair == AttemptId(2, 1)
    assert [claim.pair for claim in second.known] == [AttemptId(1, 1)]


def test_every_rank_of_a_world_learns_of_a_foreign_claim(tmp_path: Path, world: Callable[..., Any]) -> None:
    write_claim(tmp_path, Claim(pair=AttemptId(2, 1), job_uid="other", publication="x", from_step=0))
    attempt = Attempt(pair=AttemptId(1, 1), job_uid=JOB, publication="p1", run_id="run")

    def start(exchange: Any) -> str:
        engine = CheckpointManager(tmp_path, keep_last=3, resume=Resume.ALWAYS, on_foreign=lambda claims: None)
        engine.enter(attempt, exchange)
        with pytest.raises(ClaimError) as raised:
            engine.restore()
        return str(raised.value)

    assert len(set(world(3, start))) == 1


def test_a_save_that_outlives_its_attempt_is_never_published_half_after_the_successor_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor's cleaning is at work when the old attempt comes to publish."""
    zombie = Run(tmp_path, 1, 1)
    published: list[bool] = []
    rmtree = shutil.rmtree

    def meanwhile(path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            publish(tmp_path, staging, manifest)
        published.append(False)
        rmtree(path)

    staging = begin(tmp_path, CheckpointName(step=20, pair=zombie.pair))
    zombie.commits(10)
    manifest = replace(catalog.read_manifest(tmp_path, CheckpointName(step=10, pair=zombie.pair)), step=20)
    monkeypatch.setattr(shutil, "rmtree", meanwhile)
    Run(tmp_path, 1, 2)
    assert published == [False]
    assert commits(tmp_path) == {"step-10.g1.a1"}


# What a save is made of


def test_a_state_that_cannot_be_copied_fails_its_save_and_not_the_next(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, 1).commits(10)

    def gone(piece: Piece) -> bytes:
        raise RuntimeError("the device is gone")

    spec = TensorSpec(name="w", dtype="U8", shape=(4,))
    with pytest.raises(RuntimeError, match="the device is gone"):
        run.engine.begin(replace(snapshot(20, run.pair), specs=[spec], read=gone))
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


def damage(root: Path) -> None:
    for shard in root.glob("step-*/rank-0.json"):
        shard.write_bytes(b"?" * shard.stat().st_size)


def entered(root: Path, copies: str = "", keep_last: int = 3) -> CheckpointManager:
    engine = CheckpointManager(
        root, keep_last=keep_last, resume=Resume.ALWAYS, on_foreign=lambda claims: None, copies=copies
    )
    engine.enter(Attempt(pair=AttemptId(1, 2), job_uid=JOB, publication="p1", run_id="run"), Alone())
    return engine


def test_where_all_is_damaged_training_does_not_begin_anew_over_it(tmp_path: Path) -> None:
    Run(tmp_path, 1, 1).commits(10, 20)
    damage(tmp_path)
    before, claimed = commits(tmp_path), list_claims(tmp_path)

    for _ in range(2):  # a start again is no consent
        with pytest.raises(NoneWholeError, match=r"step-20\.g1\.a1 .*step-10\.g1\.a1 .*verify.* --quarantine"):
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


def test_another_jobs_damage_does_not_stop_one_that_is_not_to_resume_it(tmp_path: Path) -> None:
    Run(tmp_path, 1, 1).commits(10)
    damage(tmp_path)
    fresh = Run(tmp_path, 2, 1, job="job-2", resume=Resume.NEVER, known=tuple(list_claims(tmp_path)))
    assert fresh.found.step == 0


def test_a_job_whose_first_commit_is_damaged_begins_anew_and_keeps_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Run(tmp_path, 1, 1).commits(10)
    damage(tmp_path)
    found = entered(tmp_path).restore()
    assert "training starts from the beginning" in caplog.text
    assert (found.loaded, found.stuck) == (None, ())
    assert [bad.path for bad in found.lost] == ["step-10.g1.a1"]
    assert list((tmp_path / "quarantine").glob("*/rank-0.safetensors"))


def test_one_damaged_commit_may_be_the_last_of_many_where_one_is_kept(tmp_path: Path) -> None:
    Run(tmp_path, 1, 1).commits(10)
    damage(tmp_path)
    with pytest.raises(NoneWholeError):
        entered(tmp_path, keep_last=1).restore()
    assert not (tmp_path / "quarantine").exists()


def test_an_error_of_the_volume_that_lasts_a_while_costs_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A soft mount whose server is away: no file can be read, and no folder be renamed."""
    Run(tmp_path, 1, 1).commits(10, 20)

    def away(*_: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", away)
    monkeypatch.setattr(Path, "rename", away)
    with pytest.raises(NoneWholeError):
        entered(tmp_path).restore()
    monkeypatch.undo()
    assert entered(tmp_path).restore().step == 20


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A store of copies that has steps 10 and 20; as often as this says it cannot be asked."""
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


def test_copies_that_were_away_for_a_moment_are_asked_before_anything_is_given_up(
    tmp_path: Path, away: list[int]
) -> None:
    damage(tmp_path / "shared")
    away[0] = 2
    assert entered(tmp_path / "shared", "s3://copies/job").restore().step == 20


@pytest.mark.parametrize("what", ["damaged", "fenced"])
def test_copies_that_stay_away_stop_a_job_that_has_nothing_else(tmp_path: Path, away: list[int], what: str) -> None:
    if what == "damaged":
        damage(tmp_path / "shared")
    else:  # what stands on the volume is a zombie's, and what went on was lost with it
        for folder in (tmp_path / "shared").glob("step-*"):
            shutil.rmtree(folder)
        commit = tmp_path / "copies" / "step-20.g1.a1"
        shutil.copytree(commit, tmp_path / "shared" / commit.name)
        fence = Claim(pair=AttemptId(1, 2), job_uid=JOB, publication="p1", from_step=10, from_pair=AttemptId(1, 1))
        write_claim(tmp_path / "shared", fence)
    before = commits(tmp_path / "shared")
    away[0] = 1000
    with pytest.raises(UnavailableError, match="no network") as refused:
        entered(tmp_path / "shared", "s3://copies/job").restore()
    assert refused.value.cause == "Network"
    assert commits(tmp_path / "shared") == before


def test_copies_that_stay_away_may_hold_what_is_corrupt_here(tmp_path: Path, away: list[int]) -> None:
    """To continue from 10 would fence the good copy of 20, and retention would delete it. Nothing is moved either."""
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


def test_copies_that_stay_away_stop_nobody_whose_newest_commit_is_good(tmp_path: Path, away: list[int]) -> None:
    away[0] = 1000
    assert entered(tmp_path / "shared", "s3://copies/job").restore().step == 20


def test_copies_that_stay_away_may_hold_what_a_volume_had_that_was_rolled_back(
    tmp_path: Path, away: list[int]
) -> None:
    shutil.rmtree(tmp_path / "shared" / "step-20.g1.a1")
    away[0] = 1000
    engine = entered(tmp_path / "shared", "s3://copies/job")
    engine.enter(replace(engine._fence.attempt, durable=20), Alone())
    with pytest.raises(UnavailableError, match="no network"):
        engine.restore()
    engine.enter(replace(engine._fence.attempt, durable=10), Alone())
    assert engine.restore().step == 10, "nothing newer was there"


def test_copies_that_stay_away_may_hold_what_the_last_attempt_continued(tmp_path: Path, away: list[int]) -> None:
    """It was read from there, and the volume has only older ones."""
    write_claim(
        tmp_path / "shared",
        Claim(pair=AttemptId(1, 2), job_uid=JOB, publication="p1", from_step=20, from_pair=AttemptId(1, 1)),
    )
    shutil.rmtree(tmp_path / "shared" / "step-20.g1.a1")
    away[0] = 1000
    with pytest.raises(UnavailableError, match="no network"):
        entered(tmp_path / "shared", "s3://copies/job").restore()
