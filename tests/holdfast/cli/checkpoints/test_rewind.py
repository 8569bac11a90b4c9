"""`holdfast checkpoints rewind` fences newer checkpoints on every tier, and deletes none of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
from nothing_managed import snapshot

from holdfast.checkpoint.attempt_info import Attempt
from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.stores.open import open_store
from holdfast.cli.checkpoints.main import main
from holdfast.core.attempt import AttemptId
from holdfast.launcher.rendezvous.folder_lock import hold


class Run:
    """One attempt of a job that restored and claimed."""

    def __init__(self, root: Path, generation: int, attempt: int = 1, *, copies: str = "") -> None:
        self.engine = CheckpointManager(
            root, keep_last=2, resume=Resume.ALWAYS, on_foreign=lambda claims: None, copies=copies
        )
        self.memory = root.with_name("memory")
        self.memory.mkdir(exist_ok=True)
        self.enter(AttemptId(generation, attempt))
        self.found = self.engine.restore()
        self.engine.claim(step=self.found.step, attempt_id=self.found.attempt_id)

    def enter(self, attempt_id: AttemptId) -> None:
        self.attempt_id = attempt_id
        publication = f"p{attempt_id.generation}"
        self.engine.enter(
            Attempt(attempt_id=attempt_id, job_uid="job-1", publication=publication, run_id="run"), SingleRank()
        )
        me = {"node": "n", "pod": "w", "host": "127.0.0.1", "port": 1}
        said = {"limit": None, "interval": 1, "perSecond": None, "peerInterval": None, "inFlight": None}
        memory = {**said, "folder": str(self.memory), "me": me, "key": "00"}
        self.engine.enter_tiers({"memory": memory}, [{"memory": memory}], 0, lambda: None)

    def commits(self, *steps: int) -> Run:
        for step in steps:
            assert self.engine.save(snapshot(step, self.attempt_id)).committed
        return self


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The newest checkpoint leads to a failure: two attempts started from it."""
    Run(tmp_path / "ckpt", 1).commits(10, 20)
    Run(tmp_path / "ckpt", 1, 2)
    Run(tmp_path / "ckpt", 1, 3)
    return tmp_path / "ckpt"


def steps(root: Path) -> set[int]:
    return {name.step for name in catalog.list_commits(root)}


def aside(root: Path) -> list[str]:
    return sorted(path.name.rpartition(".")[0] for path in (root / "quarantine").glob("*") if path.is_dir())


def files(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file() and path.name != "run.lock"}


def test_job_resumes_from_the_step_and_from_later_saves(root: Path) -> None:
    assert main(["rewind", str(root), "--step", "10"]) == 0
    assert (steps(root), aside(root)) == ({10}, ["step-20.g1.a1"])
    second = Run(root, 3)
    assert second.found.step == 10
    assert Run(root, 3, 2).found.step == 10, "it was killed before its first commit"
    third = Run(root, 3, 3).commits(15)
    assert Run(root, 3, 4).found.step == 15, "it does not go back again"
    assert third.found.step == 10


def test_later_attempts_of_the_same_claim_are_fenced_in_memory(root: Path) -> None:
    run = Run(root, 1, 4)
    run.enter(AttemptId(1, 9))  # it continues from memory, under the claim of attempt 4
    assert run.engine.save_on(run.engine.tiers[0], snapshot(25, run.attempt_id)).committed
    assert main(["rewind", str(root), "--step", "10"]) == 0
    assert Run(root, 3).found.step == 10


def test_what_was_set_aside_outlives_retention(root: Path) -> None:
    main(["rewind", str(root), "--step", "10"])
    Run(root, 3).commits(30, 40, 50)
    assert (steps(root), aside(root)) == ({40, 50}, ["step-20.g1.a1"])


def test_newer_copies_and_late_checkpoints_are_fenced_as_well(root: Path, tmp_path: Path) -> None:
    late = Run(root, 1, 4)
    copies = tmp_path / "copies"
    assert main(["copy", str(root), str(copies)]) == 0
    main(["rewind", str(root), "--step", "10"])
    late.commits(30)
    found = Run(root, 3, copies=f"file://{copies}").found
    assert (found.step, found.attempt_id) == (10, AttemptId(1, 1))
    assert steps(copies) == {10, 20}


def test_command_killed_after_its_claim_can_be_repeated(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(catalog, "move_to_quarantine", refuses)
    assert main(["rewind", str(root), "--step", "10"]) == 3
    assert "resumes from step-10.g1.a1, but step-20.g1.a1 cannot be moved" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["rewind", str(root), "--step", "10"]) == 0
    assert (steps(root), aside(root)) == ({10}, ["step-20.g1.a1"])
    assert Run(root, 4).found.step == 10


def test_a_dry_run_says_what_would_be_done_and_changes_nothing(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(root)
    assert main(["rewind", str(root), "--step", "10", "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["commit"], told["setAside"], told["dryRun"]) == ("step-10.g1.a1", ["step-20.g1.a1"], True)
    assert files(root) == before


def damage(root: Path) -> None:
    (root / "step-10.g1.a1" / "rank-0.json").write_bytes(b"{}")


def forget(root: Path) -> None:
    for path in (root / "claims").iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("prepare", "step", "refusal"),
    [
        (lambda root: None, "11", (2, "no checkpoint of step 11 that the job would read; it has steps: 10, 20")),
        (damage, "10", (1, "step-10.g1.a1 is not complete")),
        (forget, "10", (2, "has no claims, so no job resumes from it")),
    ],
)
def test_unusable_step_is_refused_and_nothing_is_changed(
    root: Path,
    capsys: pytest.CaptureFixture[str],
    prepare: Callable[[Path], None],
    step: str,
    refusal: tuple[int, str],
) -> None:
    prepare(root)
    before, (code, says) = files(root), refusal
    assert main(["rewind", str(root), "--step", step]) == code
    assert says in capsys.readouterr().err
    assert files(root) == before


def test_a_folder_in_which_a_run_trains_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(root)
    release = asyncio.run(hold(root, "another run"))
    try:
        assert main(["rewind", str(root), "--step", "10"]) == 2
    finally:
        release()
    assert "another run has its checkpoints in" in capsys.readouterr().err
    assert files(root) == before


def test_one_checkpoint_is_refused(root: Path) -> None:
    assert main(["rewind", f"{root}/step-10.g1.a1", "--step", "10"]) == 2
    assert steps(root) == {10, 20}


def test_a_job_in_an_object_store_goes_back_too(root: Path) -> None:
    url = f"memory://{uuid4().hex}"
    assert main(["copy", str(root), url]) == 0
    store = open_store(url)
    for claim in open_store(str(root)).claims():
        store.keep_claim(claim)
    assert main(["rewind", url, "--step", "10"]) == 0
    assert [name.step for name in store.commits()] == [10]
    newest = max(store.claims(), key=lambda claim: claim.attempt_id)
    assert (newest.attempt_id, newest.from_step) == (AttemptId(2, 1), 10)
    assert main(["verify", url]) == 0
