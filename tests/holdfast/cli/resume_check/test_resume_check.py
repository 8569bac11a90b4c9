"""`holdfast resume-check` on real scripts: one whose restart is exact, and others that differ or fail."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from holdfast.cli.checkpoints.diff import Difference
from holdfast.cli.main import main
from holdfast.cli.resume_check import run
from holdfast.cli.resume_check.options import Plan
from holdfast.cli.resume_check.report import of_script
from holdfast.core.errors import CheckError, CorruptCheckpointError

SCRIPT = Path(__file__).parents[1] / "scripts" / "resumed.py"
HOLDFAST = (sys.executable, "-m", "holdfast")
Checked = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def checked(tmp_path: Path, short_path: Path) -> Checked:
    """Run the command with a kind of script."""

    def start(kind: str, *options: str, max_steps: int = 1000) -> subprocess.CompletedProcess[str]:
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

    return start


def test_exact_restart_of_two_ranks(checked: Checked) -> None:
    ended = checked("exact", "--nproc-per-node", "2", max_steps=4)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "equal: 4 steps, and 2 steps, a restart and 2 steps, end with the same 16 tensors" in ended.stdout


@pytest.mark.thorough
def test_state_that_is_not_managed_is_found_at_the_first_step_after_the_restart(checked: Checked) -> None:
    ended = checked("left-out")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "differs: first at step 3, in model/0.weight, by at most " in ended.stdout
    assert "the restart is not exact" in ended.stdout
    assert "not in job.manage()" in ended.stdout


@pytest.mark.thorough
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


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [([1.0, -2.0], [1.0, 1.5], 3.5), ([1.0, math.nan], [1.0, 2.0], None), ([math.inf], [1.0], None)],
)
def test_the_largest_difference_is_a_finite_number(
    ours: list[float], theirs: list[float], expected: float | None
) -> None:
    one, other = (
        SimpleNamespace(
            manifest=SimpleNamespace(tensors={"w": SimpleNamespace(dtype="F32")}),
            tensor=lambda _, values=values: bytearray(array("f", values).tobytes()),
        )
        for values in (ours, theirs)
    )
    assert run._largest(one, other, "w") == expected  # type: ignore[arg-type]


def test_a_step_without_a_checkpoint_is_named_with_the_end_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "log").write_text("".join(f"line {number} {'x' * 1000}\n" for number in range(1000)) + "disk full\n")
    made = run._Run(tmp_path, Plan(steps=4, timeout=1, script=()), {})
    with pytest.raises(CheckError, match=r"^the checkpoint of step 3 was not written") as raised:
        made.content(3)
    assert "\n  | disk full" in str(raised.value)
    assert len(str(raised.value)) < 1 << 16


def test_generators_and_their_seeds_are_not_of_the_script() -> None:
    paths = ("state.failures.0", "state.rank-0", "state.streams.ranks.0.numpy", "state.counters.skipped")
    found = Difference(added=(), missing=(), shapes=(), dtypes=(), changed=(), state=paths, same=2)
    assert of_script(found).state == ("state.counters.skipped",)


def test_an_error_of_a_checkpoint_is_a_failed_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_find", Mock(side_effect=CorruptCheckpointError("a chunk has other bytes")))
    assert run.check(Plan(steps=4, timeout=1, script=()), {}) == 2
    assert capsys.readouterr().out == "resume-check: a chunk has other bytes\n"
