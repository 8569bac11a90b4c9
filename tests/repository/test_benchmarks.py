"""Every benchmark and drill can be started: what a change of the product's modules would break without a word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = [path for folder in ("benchmarks", "drills") for path in sorted((ROOT / folder).glob("[!_]*.py"))]


@pytest.mark.thorough
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_it_says_what_it_measures_and_how_much(program: Path) -> None:
    done = subprocess.run([sys.executable, str(program), "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout
    assert "--full" in done.stdout
