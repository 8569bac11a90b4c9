"""Real processes over gloo, of which some are out of GPU memory in step 5 of 8."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_launcher import PATIENCE, SCRIPTS


@pytest.fixture
def training(launcher: Any) -> Any:
    launcher.script = SCRIPTS / "out_of_memory.py"
    return launcher


def await_end_of(launcher: Any, attempt: int, *slots: int) -> None:
    """Wait until these slots have left the attempt."""
    launcher.wait("the end of the attempt", lambda: all(launcher.has_left(slot, attempt) for slot in slots))


def check(launcher: Any) -> tuple[list[str], list[str]]:
    """Check the ends of both ranks. Return the results of the calls of both."""
    assert launcher.finish() == [0, 0], launcher.output()
    first, second = launcher.told(0), launcher.told(1)
    assert first["weights"] == second["weights"]
    assert first["audit"] == second["audit"]
    assert first["audit"].startswith("exactly once (80 samples")
    return first["losses"], second["losses"]


def messages(launcher: Any, slot: int) -> list[tuple[int, int, int]]:
    return [(told["step"], told["rank"], told["microBatch"]) for told in launcher.of(slot, "outOfMemory")]


def test_all_ranks_repeat_the_step_and_then_halve_their_micro_batches(training: Any, tmp_path: Path) -> None:
    """Rank 1 is out of memory twice. The other rank loses a peer, and nothing else."""
    training.start(2, tmp_path / "tier", "0", "2")
    for attempt in (1, 2):
        await_end_of(training, attempt, 0, 1)
        training.form(attempt + 1, [0, 1])
    results = check(training)
    assert messages(training, 1) == [(4, 1, 0), (4, 1, 2)]
    assert messages(training, 0) == []
    assert [told["keep"] for slot in (0, 1) for told in training.of(slot, "left")] == [True] * 4
    assert [(told["step"], told["source"]) for told in training.of(1, "restored")][1:] == [(4, "memory")] * 2
    for of_rank in results:
        assert [one for one in of_rank if one.startswith("8")] == ["8 1 Committed"]
        assert of_rank[-3:] == ["7 2 Accumulating", "7 2 Accumulating", "8 1 Committed"], "5 samples: 2, 2 and 1"


@pytest.mark.parametrize("lost", [0, 1])
def test_rank_may_be_lost_before_the_step_is_repeated(training: Any, tmp_path: Path, lost: int) -> None:
    """The record of rank 1 is lost with it: its successor is out of memory once more."""
    training.start(2, tmp_path / "tier", "0", "1")
    await_end_of(training, 1, 0, 1)
    training.lose(lost)
    training.form(2, [0, 1])
    if lost:
        await_end_of(training, 2, 0, 1)
        training.form(3, [0, 1])
    check(training)
    assert messages(training, 1)[-1] == (4, 1, 0)


def test_other_number_of_ranks_keeps_the_limit_of_a_checkpoint(training: Any, tmp_path: Path) -> None:
    training.interval = "1"
    training.start(2, tmp_path / "tier", "2", "2")
    for attempt in (1, 2):
        await_end_of(training, attempt, 0, 1)
        training.form(attempt + 1, [0, 1])
    training.wait("a checkpoint", lambda: any(told["step"] >= 6 for told in training.of(0, "checkpoint")))
    for slot in (0, 1):
        training.processes[slot].kill()
        training.processes[slot].wait()
    training.start(1, tmp_path / "tier", "0", attempt=9)
    assert training.finish() == [0], training.output()
    told = training.told(0)
    assert told["losses"][-5:] == ["7 2 Accumulating"] * 4 + ["8 2 Committed"]
    assert told["audit"].startswith("exactly once (80 samples")


def run(folder: Path, *tries: str, restarts: int = 0, fits: int = 80) -> subprocess.CompletedProcess[str]:
    options = ["--nproc-per-node", "2", "--max-restarts", str(restarts), str(SCRIPTS / "out_of_memory.py")]
    words = [sys.executable, "-m", "holdfast", "run", *options, *tries]
    environ = os.environ | {
        "HOLDFAST_CHECKPOINT_DIR": str(folder / "tier"),
        "OMP_NUM_THREADS": "1",
        "FITS": str(fits),
    }
    return subprocess.run(words, env=environ, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.thorough
def test_launcher_repeats_the_step_with_the_same_processes_and_no_budget(tmp_path: Path) -> None:
    ended = run(tmp_path, "0", "2")
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert said.count('"4 3 Retried"') + said.count('"4 2 Retried"') >= 2, said
    assert said.count('"8 1 Committed"') == 2, "each process has seen all attempts"
    assert '"cause": "OOM", "reason": "OutOfMemoryRetried"' in said


@pytest.mark.thorough
def test_launcher_fails_the_job_with_advice_if_single_samples_do_not_fit(tmp_path: Path) -> None:
    ended = run(tmp_path, "0", "100")
    said = ended.stdout + ended.stderr
    assert ended.returncode == 1, said
    assert said.count('"cause": "OOM", "reason": "OutOfMemoryRetried"') == 3
    assert '"cause": "OOM", "reason": "OutOfMemory"' in said
    assert "more than 0 incidents of cause OOM" in said
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in said


@pytest.mark.thorough
def test_next_processes_halve_what_the_last_ones_could_not_compute(tmp_path: Path) -> None:
    """The forward pass of a `for` loop raises the error, so each process ends. The launcher keeps its record."""
    ended = run(tmp_path, "0", "0", restarts=2, fits=2)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert '"cause": "OOM", "reason": "OutOfMemory"' in said
    assert said.count('"8 1 Committed"') == 2, said
    assert said.count("exactly once (80 samples") == 2, said
