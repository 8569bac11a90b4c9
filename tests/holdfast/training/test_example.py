"""The example runs by hand as its README says, fails once on request, and resumes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "trainer_lib" / "examples" / "gpt" / "train.py"
SMALL = ["--max-steps", "6", "--d-model", "16", "--layers", "1", "--context", "16", "--corpus-bytes", "2000000"]
SAID = re.compile(r"held-out bits per byte: (?P<loss>[0-9.]+) at step 6\b")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    ours = ("HOLDFAST_", "RANK", "WORLD_SIZE", "MASTER_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environ |= {"HOLDFAST_CHECKPOINT_DIR": str(folder), "HOLDFAST_CHECKPOINT_INTERVAL": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), *SMALL, *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)


@pytest.mark.thorough
def test_the_example_fails_once_and_goes_on_from_its_last_step(tmp_path: Path) -> None:
    inject = tmp_path / "inject.json"
    inject.write_text(json.dumps({"raise_at_step": 4}))
    failed = run(tmp_path / "tier", "--inject", str(inject))
    assert failed.returncode == 1
    assert "RuntimeError: asked to fail at step 4" in failed.stderr
    again = run(tmp_path / "tier", "--inject", str(inject))
    assert again.returncode == 0, again.stderr
    assert "resumes from step 3" in again.stderr  # a checkpoint is due at even steps, and at a failure
    assert f"audit: exactly once ({6 * 24} samples" in again.stdout
    said = SAID.search(again.stdout)
    assert said is not None
    assert 0 < float(said["loss"]) < 9
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"tier", "inject.fired"}  # only what goes through holdfast
