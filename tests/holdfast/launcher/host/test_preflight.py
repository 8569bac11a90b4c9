"""The checkpoint volume is tested before a job starts: the name of each fault, and the repeated test."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.environment import read_environment
from holdfast.launcher.host import preflight
from holdfast.launcher.host.preflight import (
    OBJECT_STORE,
    STORAGE,
    Board,
    Check,
    Folder,
    Needs,
    Result,
    Trial,
    document,
    start,
    try_store,
    try_volume,
)

CONTRACT = Path(__file__).parents[3] / "contract"
NEEDS = Needs(free_bytes=1 << 30, write_bytes=1 << 20, seconds=60.0)
MODEST = Needs(free_bytes=1 << 20, write_bytes=1 << 10, seconds=60.0)


class Slow:
    """A volume on which each MiB takes this long, by its own clock."""

    def __init__(self, *, write: float = 0.0, sync: float = 0.0, free: int | None = 4 << 30) -> None:
        self.clock, self.removed = 0.0, False
        self._write, self._sync, self._free = write, sync, free

    def monotonic(self) -> float:
        return self.clock

    def free_bytes(self) -> int | None:
        return self._free

    def write(self, piece: bytes) -> None:
        self.clock += self._write * len(piece) / (1 << 20)

    def sync(self) -> None:
        self.clock += self._sync

    def use_names(self) -> None:
        pass

    def remove(self) -> None:
        self.removed = True


@pytest.mark.parametrize(
    ("volume", "result", "says"),
    [
        (Slow(write=0.01, sync=0.02), Result.PASSED, "4 GiB are free, 80 MiB/s are written"),
        (Slow(write=0.01, free=None), Result.PASSED, "100 MiB/s are written"),
        (Slow(free=512 << 20), Result.FAILED, "512 MiB are free on the checkpoint volume, 1 GiB are required"),
        (Slow(write=1.5), Result.FAILED, "writes 683 KiB/s, 1 MiB/s are required"),
        (Slow(sync=16.0), Result.FAILED, "writes 512 KiB/s, 1 MiB/s are required"),
        (Slow(write=25.0), Result.FAILED, "only 3 MiB were written to the checkpoint volume within 60 s"),
    ],
)
def test_room_and_pace_are_judged(volume: Slow, result: Result, says: str) -> None:
    check = try_volume(volume, NEEDS, volume.monotonic)
    assert check.result is result
    assert says in check.message


class Broken(Slow):
    """A volume that can be read but not written."""

    def write(self, _: bytes) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_volume_that_may_not_be_written_is_told_with_the_mend() -> None:
    volume = Broken()
    check = try_volume(volume, NEEDS, volume.monotonic)
    assert check.result is Result.FAILED
    assert "cannot be written: Permission denied; let the trainer's user write there" in check.message
    assert volume.removed


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 2 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "holdfast-test", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_told_and_left_as_it_was(small: Path) -> None:
    check = try_volume(Folder(small, "gpt-w0"), MODEST, lambda: 0.0)
    assert (check.result, "No space left on device; delete files" in check.message) == (Result.FAILED, True)
    assert list(small.iterdir()) == []


def test_a_real_folder_passes_and_is_left_as_it_was(tmp_path: Path) -> None:
    assert try_volume(Folder(tmp_path, "gpt-w0"), MODEST, lambda: 0.0).result is Result.PASSED
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EXDEV, errno.EIO])
def test_volume_without_folder_rename_is_reported_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The report precedes training."""

    def refuses(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(source))

    monkeypatch.setattr(os, "rename", refuses)
    check = try_volume(Folder(tmp_path, "gpt-w0"), MODEST, lambda: 0.0)
    assert (check.result, check.message) == (
        Result.FAILED,
        f"the checkpoint volume cannot be written: cannot rename a folder: {os.strerror(number)}",
    )
    assert list(tmp_path.iterdir()) == []


def test_what_a_trial_that_was_killed_left_stops_no_other(tmp_path: Path) -> None:
    left = tmp_path / ".preflight-gpt-w0.tmp"
    left.mkdir()
    (left / "new").touch()
    assert try_volume(Folder(tmp_path, "gpt-w0"), MODEST, lambda: 0.0).result is Result.PASSED
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    check = try_volume(Folder(tmp_path / "none", "gpt-w0"), MODEST, lambda: 0.0)
    assert (check.result, "No such file" in check.message) == (Result.FAILED, True)


def told(run_dir: Path) -> dict[str, Any]:
    (check,) = json.loads((run_dir / "preflight.json").read_text())["checks"]
    return check


def test_what_failed_is_tried_again_until_it_passes(tmp_path: Path) -> None:
    volume, seen = Slow(free=0), []

    def mended(_: float) -> None:
        seen.append(told(tmp_path)["result"])
        volume._free = 4 << 30

    Trial(Board(tmp_path), STORAGE, lambda: try_volume(volume, NEEDS, volume.monotonic), sleep=mended).run()
    assert (seen, told(tmp_path)["result"]) == (["Failed"], "Passed")


def test_a_check_that_breaks_is_told_and_tried_again(tmp_path: Path) -> None:
    seen: list[str] = []

    def attempt() -> Check:
        if not seen:
            raise ZeroDivisionError("odd")
        return Check(result=Result.PASSED, message="well")

    Trial(Board(tmp_path), STORAGE, attempt, sleep=lambda _: seen.append(told(tmp_path)["message"])).run()
    assert (seen, told(tmp_path)["result"]) == (["the check itself failed: ZeroDivisionError('odd')"], "Passed")


def test_a_result_that_cannot_be_written_is_written_later(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    passed = Check(result=Result.PASSED, message="well")
    Trial(Board(run_dir), STORAGE, lambda: passed, sleep=lambda _: run_dir.mkdir()).run()
    assert told(run_dir)["result"] == "Passed"


def test_what_is_not_there_is_skipped(tmp_path: Path) -> None:
    asked = {"HOLDFAST_PREFLIGHT_FREE_BYTES": "1", "HOLDFAST_PREFLIGHT_WRITE_BYTES": "1"}
    start(read_environment({"HOLDFAST_RUN_DIR": str(tmp_path), "HOLDFAST_PREFLIGHT_OBJECT": "1", **asked}))
    assert json.loads((tmp_path / "preflight.json").read_text())["checks"] == [
        {"name": "Storage", "result": "Skipped", "message": "there is no checkpoint volume"},
        {"name": "ObjectStore", "result": "Skipped", "message": "there is no object store"},
    ]


def test_a_checkpoint_directory_in_an_object_store_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    monkeypatch.setattr(preflight, "_start_store", lambda board, environment, url: checked.append(url))
    environ = {"RUN_DIR": str(tmp_path), "CHECKPOINT_DIR": "s3://b/ml/gpt", "PREFLIGHT_OBJECT": "1"}
    environ |= {"PREFLIGHT_FREE_BYTES": "1", "PREFLIGHT_WRITE_BYTES": "1"}
    start(read_environment({f"HOLDFAST_{name}": value for name, value in environ.items()}))
    assert checked == ["s3://b/ml/gpt"]
    assert told(tmp_path)["result"] == "Skipped", "there is no volume"


def test_nothing_is_told_where_nothing_is_asked(tmp_path: Path) -> None:
    start(read_environment({"HOLDFAST_RUN_DIR": str(tmp_path), "HOLDFAST_OBJECT_URL": "s3://models/runs"}))
    assert list(tmp_path.iterdir()) == []


def test_the_golden_file_is_what_is_written() -> None:
    golden = json.loads((CONTRACT / "preflight.json").read_text())
    volume, store = (entry["message"] for entry in golden["checks"])
    checks = {
        STORAGE: Check(result=Result.PASSED, message=volume),
        OBJECT_STORE: Check(result=Result.FAILED, message=store, concerns_job=True),
    }
    assert document(checks) == golden


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("import sys; sys.exit('out of memory')", "the object store check failed: out of memory"),
        ("print('[1, 2]')", "the object store check failed: it wrote no error"),
        ("pass", "the object store check failed: it wrote no error"),
    ],
)
def test_a_trial_that_gives_no_verdict_has_failed(program: str, says: str) -> None:
    assert try_store([sys.executable, "-c", program], 60) == Check(result=Result.FAILED, message=says)


def test_a_trial_that_hangs_is_given_up() -> None:
    check = try_store([sys.executable, "-c", "__import__('signal').pause()"], 0.2)
    assert check.message == "the object store has not answered within 0 s"


def test_launcher_reports_the_volume_before_anything_else(
    cluster: Any, wait_for: Callable[..., Any], tmp_path: Path
) -> None:
    asked = {"HOLDFAST_PREFLIGHT_FREE_BYTES": "1048576", "HOLDFAST_PREFLIGHT_WRITE_BYTES": "1"}
    (pod,) = cluster.start("a", HOLDFAST_CHECKPOINT_DIR=str(tmp_path), **asked)
    assert wait_for(lambda: told(pod.run_dir)["result"] != "Running", "the trial's end")
    assert told(pod.run_dir)["result"] == "Passed"
