"""The benchmark of checkpoints runs and keeps its output format. Its quick figures are not judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent.parent
BARS = {f"checkpoint-{number}" for number in (*range(1, 8), 12)}
# Where a peer is not installed, or no network namespace can be created, a row says so.
OPTIONAL = {"", "checkpoint-peer", "object-upload", "object-restore"}


@pytest.mark.thorough
def test_the_quick_benchmark_makes_its_rows() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "checkpoint.py"), "--quick"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert run.returncode == 0, run.stderr
    rows = json.loads((ROOT / "out" / "bench" / "checkpoint.quick.json").read_text())["rows"]
    assert BARS <= {row["bar"] for row in rows} <= BARS | OPTIONAL
    assert all(row["n"] > 0 and row["p10"] <= row["p90"] for row in rows if row["bar"] in BARS)
    assert {dtype for dtype in ("fp32", "bf16") for row in rows if dtype in row["what"]} == {"fp32", "bf16"}
