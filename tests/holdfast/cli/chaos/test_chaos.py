"""A real training completes with every sample seen once, with every fault that `holdfast chaos` injects."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.fault_injection.step_trace import Trace

STEPS = 60
Hurt = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hurt(tmp_path: Path, short_path: Path) -> Hurt:
    """A training under chaos, of two ranks by default."""

    def run(*words: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
        script = [sys.executable, "-m", "holdfast.cli.demo.train", str(tmp_path), str(STEPS)]
        return subprocess.run(
            [sys.executable, "-m", "holdfast", "chaos", *words, "--nproc-per-node", str(ranks), "--", *script],
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
        "--bad-sample",
        "rank=1,step=25",
        "--slow",
        "rank=1,step=30,seconds=0.05",
        "--oom",
        "rank=0,step=35,steps=2",
    ]
    ended = hurt(*words, "--sleep", "rank=0,step=40,seconds=0.2", "--stop", "rank=1,step=50,seconds=0.2")
    assert ended.returncode == 0, ended.stderr
    assert audit(tmp_path) == {"ok": True, "samples": STEPS * 48, "step": STEPS}
    for kind in (
        "kill to rank 1",
        "exception to rank 0",
        "bad-sample to rank 1",
        "slow to rank 1",
        "oom to rank 0",
        "sleep to rank 0",
        "stop to rank 1",
    ):
        assert f"chaos: {kind}" in ended.stderr
    assert "7 faults, 0 steps lost" in ended.stderr
    assert re.search(r"step 25, rank 1: sample \d+ is skipped: ChaosError: holdfast chaos", ended.stderr)


def test_numbers_that_are_not_finite_are_skipped_repaired_and_rolled_back(hurt: Hurt, tmp_path: Path) -> None:
    words = ["--nan-loss", "rank=1,step=10", "--nan-gradient", "rank=0,step=16", "--nan-weight", "rank=1,step=23"]
    ended = hurt(*words, "--nan-loss", "rank=0,step=40,steps=10", "--checkpoint-interval", "6")
    assert ended.returncode == 0, ended.stderr
    assert audit(tmp_path) == {"ok": True, "samples": STEPS * 48, "step": STEPS}
    rows = re.findall(r"^(nan-\S+) +(\d+) +\d+ +[\d.]+ s +(\d+) *(\S*)$", ended.stderr, re.MULTILINE)
    assert rows == [
        ("nan-loss", "1", "0", ""),
        ("nan-gradient", "0", "0", ""),
        ("nan-weight", "1", "0", "NonFinite/RolledBack"),
        ("nan-loss", "0", "12", "NonFinite/RolledBack"),  # to step 36, after step 48
    ]
    assert "4 faults, 12 steps lost" in ended.stderr
    assert (
        ended.stderr.count("the job rolls back to a checkpoint before step 40: the loss on rank 0 of steps 40 to 49")
        >= 2
    )
    for step in (10, 16):
        assert f"step {step} was not applied" in ended.stderr


@pytest.mark.thorough
def test_flipped_bit_is_named_and_repaired_without_an_effect_on_losses(hurt: Hurt, tmp_path: Path) -> None:
    losses = []
    for number, fault in enumerate(("--slow", "--flip-weight"), start=1):
        more = ",seconds=0.01" if fault == "--slow" else ""
        words = [fault, f"rank=1,step=24{more}", "--checkpoint-interval", "12", "--timeline", str(tmp_path / "times")]
        ended = hurt(*words, ranks=3)
        assert ended.returncode == 0, ended.stderr
        losses.append({(mark.step, mark.rank): mark.loss for mark in Trace(tmp_path / "trace").read()})
        (tmp_path / "trace").unlink()
        shutil.rmtree(tmp_path / "checkpoints")
        assert ("after step 24, the state of rank 1 differs" in ended.stderr) is (number == 2)
        assert f"{fault.removeprefix('--')} to rank 1" in ended.stderr
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3 * STEPS
    found = [json.loads(line) for line in (tmp_path / "times").read_text().splitlines()]
    (entry,) = (line for line in found if line["kind"] == "divergence")
    assert (entry["step"], entry["ranks"], entry["repaired"]) == (24, [1], True)


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
