"""Real processes over gloo, of which one cannot read some samples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_launcher import PATIENCE, SCRIPTS

from holdfast.training.data import sample_at

ORDER = [sample_at(place, size=80, seed=0)[1] for place in range(40)]
BAD = (ORDER[13], ORDER[14])
"""Both are in step 2. With two ranks, rank 1 reads them in different micro-batches."""


@pytest.fixture
def reading(launcher: Any) -> Any:
    launcher.script = SCRIPTS / "bad_samples.py"
    return launcher


def results(launcher: Any, size: int, folder: Path, most: int) -> list[dict[str, Any]]:
    launcher.start(size, folder, str(most), *map(str, BAD))
    assert launcher.finish() == [0] * size, launcher.output()
    return [launcher.told(slot) for slot in range(size)]


def test_ranks_stay_equal_and_train_as_one_rank_does(reading: Any, tmp_path: Path) -> None:
    first, second = results(reading, 2, tmp_path / "two", 2)
    assert first == second
    assert [step for step, _ in first["losses"]] == [1, 2, 3, 4, 5]
    assert first["audit"].startswith("exactly once (40 samples")
    assert first["audit"].endswith(", 2 unreadable)")
    told = [reading.of(slot, "badSamples") for slot in (0, 1)]
    named = [{"sample": s, "rank": 1, "step": 2, "error": f"OSError: sample {s} is broken"} for s in BAD]
    assert [(one["step"], one["number"], one["samples"]) for part in told for one in part] == [(2, 2, named)] * 2
    (alone,) = results(reading, 1, tmp_path / "one", 2)
    assert alone["weights"][0] == pytest.approx(first["weights"][0])
    assert alone["weights"][1] == pytest.approx(first["weights"][1])
    assert [loss for _, loss in alone["losses"]] == pytest.approx([loss for _, loss in first["losses"]])


def test_spent_budget_ends_all_ranks_with_the_same_error(reading: Any, tmp_path: Path) -> None:
    reading.start(2, tmp_path / "tier", "1", *map(str, BAD))
    assert reading.finish() == [1, 1]
    errors = [reading.of(slot, "exception")[0] for slot in (0, 1)]
    assert {error["name"] for error in errors} == {"BadSampleError"}
    assert errors[0]["message"] == errors[1]["message"]
    assert f"sample {BAD[1]} (rank 1, step 2: OSError: sample {BAD[1]} is broken)" in errors[0]["message"]


@pytest.mark.thorough
def test_launcher_fails_the_job_at_once(tmp_path: Path) -> None:
    options = ["--nproc-per-node", "1", "--max-restarts", "3", str(SCRIPTS / "bad_samples.py")]
    words = [sys.executable, "-m", "holdfast", "run", *options, "1", *map(str, BAD)]
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 1
    assert '"cause": "Application", "reason": "BadSamples"' in run.stdout + run.stderr
    assert "another attempt would meet the same samples" in run.stdout + run.stderr
