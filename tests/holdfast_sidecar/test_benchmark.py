"""The benchmark runs and keeps its shape; its quick figures are judged by nobody."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.thorough
def test_the_quick_benchmark_makes_its_rows():
    command = [sys.executable, str(ROOT / "benchmarks" / "sidecar.py"), "--quick"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert run.returncode == 0, run.stderr
    found = json.loads((ROOT / "out" / "bench" / "sidecar.quick.json").read_text())
    assert {row["bar"] for row in found["rows"]} == {f"sidecar-{number}" for number in (1, 2, 3, 4)}
    assert all(row["n"] > 0 and row["p10"] <= row["p90"] for row in found["rows"])
    assert all((row["held"] is None) == (row["target"] == "") for row in found["rows"])
