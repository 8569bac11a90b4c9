"""`holdfast resume-check` on real scripts: one whose restart is exact, and others that differ or fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.cli.main import main

SCRIPT = Path(__file__).parents[1] / "scripts" / "resumed.py"
HOLDFAST = (sys.executable, "-m", "holdfast")
Checked = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def checked(tmp_path: Path, short_path: Path) -> Checked:
    """Run the command with a kind of script."""

    def run(kind: str, *options: str, max_steps: int = 1000) -> subprocess.CompletedProcess[str]:
        script = [sys.executable, str(SCRIPT), kind, str(max_steps), str(tmp_path / "own")]
        ended = subprocess.run(
            [*HOLDFAST, "resume-check", "--steps", "4", *options, "--", *script],
            env={**os.environ, "TMPDIR": str(short_path)},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert not (tmp_path / "own").exists(), "the job's own folder is not touched"
        assert not list(short_path.glob("holdfast-check-*"))
        return ended

    return run


def test_exact_restart_of_two_ranks(checked: Checked) -> None:
    ended = checked("exact", "--nproc-per-node", "2", max_steps=4)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "equal: 4 steps, and 2 steps, a restart and 2 steps, end with the same 16 tensors" in ended.stdout


def test_state_that_is_not_managed_is_found_at_the_first_step_after_the_restart(checked: Checked) -> None:
    ended = checked("left-out")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "differs: first at step 3, in model/0.weight, by at most " in ended.stdout
    assert "the restart is not exact" in ended.stdout
    assert "not in job.manage()" in ended.stdout


def test_script_without_a_seed_is_not_blamed_on_the_restart(checked: Checked) -> None:
    ended = checked("unseeded")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "differs: first at step 1, in model/0.bias, by at most " in ended.stdout
    assert "the script is not deterministic" in ended.stdout
    assert "a restart, and" in ended.stdout
    assert "run 3" not in ended.stdout, "no restart was needed to find it"


@pytest.mark.parametrize(
    ("kind", "max_steps", "says"),
    [
        ("exact", 3, "the script ended after step 3, before step 4. Set a smaller --steps"),
        ("no-step", 3, "the script ended without a checkpoint. Train with holdfast.init()"),
        ("fails", 9, "the script failed with exit code 1 after step 1"),
    ],
)
def test_script_that_does_not_reach_the_last_step(checked: Checked, kind: str, max_steps: int, says: str) -> None:
    ended = checked(kind, max_steps=max_steps)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert says in ended.stdout
    assert ("the disk of the data is gone" in ended.stdout) == (kind == "fails")


def test_script_that_saves_nothing_ends_with_the_patience(short_path: Path) -> None:
    ended = subprocess.run(
        [*HOLDFAST, "resume-check", "--patience", "1", "--", sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, "TMPDIR": str(short_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 2
    assert "no checkpoint for 1 s after step 0; step 10 is needed" in ended.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no command to run; end with '-- python train.py'"),
        (["--steps", "1", "--", "python", "train.py"], "--steps: invalid value '1'"),
        (["--nproc-per-node", "none", "--", "python", "train.py"], "--nproc-per-node"),
        (["--max-restarts", "3", "--", "python", "train.py"], "unrecognized arguments: --max-restarts 3"),
    ],
)
def test_arguments_that_are_not_valid(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume-check", *words]) == 2
    assert says in capsys.readouterr().err
