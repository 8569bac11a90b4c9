"""A real training completes with every sample seen once, with every fault that `holdfast chaos` injects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

STEPS = 60
Hurt = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hurt(tmp_path: Path, short_path: Path) -> Hurt:
    """A training of two ranks under chaos."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        script = [sys.executable, "-m", "holdfast.cli.demo.train", str(tmp_path), str(STEPS)]
        return subprocess.run(
            [sys.executable, "-m", "holdfast", "chaos", *words, "--nproc-per-node", "2", "--", *script],
            env={**os.environ, "TMPDIR": str(short_path), "HOLDFAST_CHECKPOINT_DIR": str(tmp_path / "checkpoints")},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


def audit(folder: Path) -> dict[str, object]:
    """Return the sample audit at the end of the training."""
    found: dict[str, object] = json.loads((folder / "audit.json").read_text())
    return found


def test_faults_at_steps_lose_no_step_and_no_sample(hurt: Hurt, tmp_path: Path) -> None:
    words = [
        "--kill",
        "rank=1,step=10,at=vote",
        "--exception",
        "rank=0,step=20",
        "--slow",
        "rank=1,step=30,seconds=0.05",
    ]
    ended = hurt(*words, "--sleep", "rank=0,step=40,seconds=0.2", "--stop", "rank=1,step=50,seconds=0.2")
    assert ended.returncode == 0, ended.stderr
    assert audit(tmp_path) == {"ok": True, "samples": STEPS * 48, "step": STEPS}
    for kind in ("kill to rank 1", "exception to rank 0", "slow to rank 1", "sleep to rank 0", "stop to rank 1"):
        assert f"chaos: {kind}" in ended.stderr
    assert "5 faults, 0 steps lost" in ended.stderr


@pytest.mark.thorough
def test_kill_at_each_point_of_a_step_loses_no_step_or_sample(hurt: Hurt, tmp_path: Path) -> None:
    points = ["data", "compute", "average", "vote", "apply", "checkpoint"]
    words = [f"rank={n % 2},step={9 * n + 8},at={point}" for n, point in enumerate(points)]
    ended = hurt(*(word for one in words for word in ("--kill", one)), "--checkpoint-interval", "6")
    assert ended.returncode == 0, ended.stderr
    assert audit(tmp_path) == {"ok": True, "samples": STEPS * 48, "step": STEPS}
    assert ended.stderr.count("chaos: kill to rank") == len(points)
    assert f"{len(points)} faults, 0 steps lost" in ended.stderr


@pytest.mark.thorough
def test_a_rate_strikes_until_the_end(hurt: Hurt, tmp_path: Path) -> None:
    (tmp_path / "pace").write_text("0.1")
    ended = hurt("--rate", "10/min", "--faults", "kill,slow", "--seed", "1495", "--checkpoint-interval", "10")
    assert ended.returncode == 0, ended.stderr
    assert "--seed 1495 repeats it" in ended.stderr
    assert "chaos: kill to rank" in ended.stderr
    assert audit(tmp_path)["ok"] is True
