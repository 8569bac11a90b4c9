"""A save to a full or read-only disk fails with its reason, and the published checkpoints stay."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.folder.claims import list_claims, write_claim
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.restore.search import restore
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import ClaimError

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "holdfast-test", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A folder that a user without privileges can reach."""
    with tempfile.TemporaryDirectory() as above:
        Path(above).chmod(0o755)
        folder = Path(above) / "commits"
        folder.mkdir()
        yield folder


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def newest(root: Path) -> int:
    return restore(root, SingleRank(), job_uid="job-1").step


def test_no_space_fails_the_save_and_gives_the_space_back(small: Path, commit: Callable[..., Any]) -> None:
    assert commit(small, 10, {"w": b"x" * 1000}).committed
    result = commit(small, 20, {"w": os.urandom(2 << 20)})
    assert not result.committed
    assert "No space left on device" in result.message
    assert result.cause == "Full"
    assert names(small) == {"step-10.g1.a1", "LATEST"}
    assert newest(small) == 10
    assert commit(small, 30, {"w": b"x" * 1000}).committed
    assert newest(small) == 30


def test_no_space_at_any_point_never_leaves_half_a_commit(small: Path, commit: Callable[..., Any]) -> None:
    """Each round, the disk fills up a little earlier, so that each write of a save fails once."""
    assert commit(small, 1, {"w": b"first"}).committed
    outcomes = set()
    for step, spare in enumerate(range(0, 40960, 4096), start=2):
        ballast = small / "ballast"
        free = os.statvfs(small)
        ballast.write_bytes(b"\0" * max(0, free.f_bavail * free.f_frsize - spare))
        result = commit(small, step, {"w": os.urandom(9000)})
        outcomes.add(result.committed)
        ballast.unlink()
        assert newest(small) == (step if result.committed else max(s for s in _steps(small)))
        assert not any(".tmp-" in name for name in names(small))
    assert outcomes == {True, False}


def _steps(root: Path) -> list[int]:
    return [int(name.split(".")[0][5:]) for name in names(root) if name.startswith("step-")]


def test_one_ranks_trouble_fails_the_save_for_all_with_its_name(
    small: Path, tmp_path: Path, world: Callable[..., Any], commit_by: Callable[..., Any]
) -> None:
    tensors = {f"w{i}": os.urandom(600_000) for i in range(3)}
    results = world(3, lambda exchange: commit_by(exchange, small, 10, tensors))
    assert {result.committed for result in results} == {False}
    assert len({result.message for result in results}) == 1
    assert "No space left" in results[0].message
    assert results[0].message.startswith("rank ")
    assert {result.cause for result in results} == {"Full"}
    assert names(small) == set()
    assert all(r.committed for r in world(3, lambda exchange: commit_by(exchange, tmp_path / "roomy", 10, tensors)))


def test_read_only_folder_fails_the_save_and_keeps_the_old_one(small: Path, commit: Callable[..., Any]) -> None:
    assert commit(small, 10, {"w": b"x"}).committed
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    result = commit(small, 20, {"w": b"y"})
    assert not result.committed
    assert "Read-only file system" in result.message
    assert result.cause == "ReadOnly"
    assert newest(small) == 10


def test_folder_without_permissions_fails_the_save_by_name(nobody: Path, commit: Callable[..., Any]) -> None:
    assert commit(nobody, 10, {"w": b"x"}).committed
    nobody.chmod(0o555)
    os.seteuid(NOBODY)
    try:
        result = commit(nobody, 20, {"w": b"y"})
    finally:
        os.seteuid(0)
    assert (result.committed, result.cause) == (False, "Denied")
    assert newest(nobody) == 10


def test_folder_replaced_by_a_file_counts_as_gone(tmp_path: Path, commit: Callable[..., Any]) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert commit(tmp_path / "file" / "commits", 10, {"w": b"x"}).cause == "Gone"


def test_damage_on_a_read_only_folder_is_passed_by_where_it_lies(small: Path, commit: Callable[..., Any]) -> None:
    commit(small, 10, {"w": b"x"})
    commit(small, 20, {"w": b"y"})
    shard = small / "step-20.g1.a1" / "rank-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    found = restore(small, SingleRank(), job_uid="job-1")
    assert found.step == 10
    assert [bad.path for bad in found.quarantined] == ["step-20.g1.a1"]
    assert shard.exists()


def test_without_a_claim_there_is_an_error_that_says_the_mend(small: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    claim = Claim(attempt_id=AttemptId(1, 1), job_uid="job-1", publication="p1", from_step=0)
    with pytest.raises(ClaimError, match="Use a checkpoint folder that is writable"):
        write_claim(small, claim)
    assert list_claims(small) == ()
