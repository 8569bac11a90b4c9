"""One attempt has one claim, and foreign claims stop it."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from manager_runs import JOB, Run
from nothing_managed import snapshot

from holdfast.checkpoint.attempt_info import Attempt, attempt_by_hand
from holdfast.checkpoint.folder import claims as claims_module
from holdfast.checkpoint.folder.claims import list_claims, write_claim
from holdfast.checkpoint.io.durable_files import RIGHT
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import ClaimError


def test_attempts_without_checkpoints_leave_one_claim(tmp_path: Path) -> None:
    """The claim fences as much as all of their claims would."""
    zombie = Run(tmp_path, 1, 1).commits(10)
    for attempt in range(2, 6):
        Run(tmp_path, 1, attempt)
    assert [claim.attempt_id.attempt for claim in list_claims(tmp_path)] == [1, 5]
    zombie.commits(20)
    assert Run(tmp_path, 2, 1).found.step == 10


def test_claim_removed_while_claims_are_listed_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Run(tmp_path, 1, 1).commits(10)
    Run(tmp_path, 1, 2)
    read, successors = claims_module._read, [3]

    def meanwhile(path: Path, attempt_id: AttemptId) -> Claim:
        if attempt_id == AttemptId(1, 2) and successors:
            Run(tmp_path, 1, successors.pop())
        return read(path, attempt_id)

    monkeypatch.setattr(claims_module, "_read", meanwhile)
    assert [claim.attempt_id.attempt for claim in list_claims(tmp_path)] == [1, 3]


def test_two_processes_cannot_claim_one_attempt(tmp_path: Path) -> None:
    Run(tmp_path, 1, 1)
    with pytest.raises(ClaimError, match=r"another process has claimed attempt 1\.1"):
        Run(tmp_path, 1, 1)


def test_claim_written_but_not_synced_is_ours_on_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = Run(tmp_path, 1, 1).claim
    later = replace(claim, attempt_id=AttemptId(2, 1), publication="p2")

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
    """A network file system may send a request twice, so that the second one finds the name taken."""
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
def test_without_hard_links_a_killed_claimant_leaves_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt continues."""
    Run(tmp_path, 1, 1).commits(10)
    (tmp_path / "claims" / f"1.2.json{RIGHT}").touch()
    with pytest.raises(ClaimError, match=r"another process has claimed attempt 1\.2"):
        Run(tmp_path, 1, 2)
    assert Run(tmp_path, 1, 3).found.step == 10
    assert sorted(path.name for path in (tmp_path / "claims").iterdir()) == ["1.1.json", "1.3.json"]


@pytest.mark.usefixtures("no_links")
def test_without_hard_links_a_killed_manual_claim_blocks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No operator or launcher counts attempts here. Only the folder shows which name is free."""
    attempt = attempt_by_hand(FolderStore(tmp_path), SingleRank())
    claim = Claim(
        attempt_id=attempt.attempt_id, job_uid=attempt.job_uid, publication=attempt.publication, from_step=0
    )
    claimant = os.fork()
    if claimant == 0:
        monkeypatch.setattr(Path, "rename", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        write_claim(tmp_path, claim)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(claimant, 0)[1]) == -signal.SIGKILL
    assert list_claims(tmp_path) == ()
    second = attempt_by_hand(FolderStore(tmp_path), SingleRank())
    run = Run(tmp_path, second.attempt_id.generation, second.attempt_id.attempt, job=second.job_uid)
    assert sorted(path.name for path in (tmp_path / "claims").iterdir()) == [f"{run.attempt_id}.json"]


@pytest.mark.usefixtures("no_links")
def test_without_hard_links_a_name_another_host_took_is_not_ours(
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
        write_claim(tmp_path, Claim(attempt_id=AttemptId(1, 1), job_uid=JOB, publication="p1", from_step=0))


@pytest.mark.parametrize(("number", "saves"), [(errno.EINVAL, True), (errno.ENOSYS, True), (errno.EIO, False)])
def test_volume_without_folder_fsync_saves_unless_fsync_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, saves: bool
) -> None:
    """If fsync of a folder fails with another error, the save fails."""
    run, fsync = Run(tmp_path, 1, 1), os.fsync

    def refuses(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuses)
    assert run.engine.save(snapshot(10, run.attempt_id)).committed is saves
    monkeypatch.undo()
    assert Run(tmp_path, 1, 2).found.step == (10 if saves else 0)


def test_another_jobs_claim_stops_the_attempt_before_it_writes(tmp_path: Path) -> None:
    Run(tmp_path, 3, 1, job="other").commits(10)
    before = sorted(path.name for path in (tmp_path / "claims").iterdir())
    with pytest.raises(ClaimError, match=r"3\.1 of job other.*Use a separate folder or URL for each job"):
        Run(tmp_path, 1, 1)
    assert sorted(path.name for path in (tmp_path / "claims").iterdir()) == before


def test_job_applied_again_on_an_old_folder_resumes_it(tmp_path: Path) -> None:
    """The job resumes when the operator knows the claims of the folder."""
    old = Run(tmp_path, 3, 1, job="other").commits(10)
    again = Run(tmp_path, 4, 1, known=(old.claim,))
    assert (again.found.step, again.found.attempt_id) == (10, AttemptId(3, 1))


def test_resume_never_starts_at_0_and_later_attempts_resume_it(tmp_path: Path) -> None:
    old = Run(tmp_path, 3, 1, job="other").commits(10)
    known = (old.claim,)
    first = Run(tmp_path, 4, 1, known=known, resume=Resume.NEVER)
    assert (first.found.step, first.claim.from_attempt_id) == (0, None)
    first.commits(5)
    assert Run(tmp_path, 4, 2, known=known, resume=Resume.NEVER).found.attempt_id == AttemptId(4, 1)


@pytest.mark.parametrize("attempt_id", [AttemptId(2, 1), AttemptId(1, 1)], ids=["above ours", "under our name"])
def test_claim_appearing_during_ours_stops_the_attempt(tmp_path: Path, attempt_id: AttemptId) -> None:
    """The check after the claim finds it: the second writer sees the claim of the first."""
    attempt = Attempt(attempt_id=AttemptId(1, 1), job_uid=JOB, publication="p1", run_id="run")
    reported: list[Claim] = []
    engine = CheckpointManager(tmp_path, keep_last=3, resume=Resume.ALWAYS, on_foreign=reported.extend)
    engine.enter(attempt, SingleRank())
    found = engine.restore()
    other = Claim(attempt_id=attempt_id, job_uid="other", publication="x", from_step=0)
    write_claim(tmp_path, other)
    with pytest.raises(ClaimError, match="another job or operator saves there"):
        engine.claim(step=found.step, attempt_id=found.attempt_id)
    assert reported == [other]


def test_a_claim_that_cannot_be_read_is_not_overlooked(tmp_path: Path) -> None:
    Run(tmp_path, 1, 1).commits(10)
    path = tmp_path / "claims" / "1.1.json"
    for text in (
        "",
        '{"version": 2}',
        json.dumps(replace(list_claims(tmp_path)[0], attempt_id=AttemptId(9, 9)).to_json()),
    ):
        path.write_text(text)
        with pytest.raises(ClaimError, match="Restore the file"):
            Run(tmp_path, 1, 2)
