"""`make test` runs what fails once more, and says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
LUCK = """
import pathlib, pytest

@pytest.mark.parametrize("number", range({hasty}))
def test_hasty(number):
    seen = pathlib.Path(__file__).with_name(f"seen-{{number}}")
    again, _ = seen.exists(), seen.touch()
    assert again, f"too hasty: {{number}}"

def test_wrong():
    assert {right}
"""


@pytest.mark.parametrize(
    ("hasty", "right", "code", "ends"),
    [
        (3, True, 0, "4 passed, 3 rerun"),
        (4, True, 1, "5 passed, 4 rerun"),
        (0, False, 1, "1 failed, 1 skipped, 1 rerun"),
    ],
)
def test_what_fails_gets_a_second_run_that_is_told_and_bounded(
    tmp_path: Path, hasty: int, right: bool, code: int, ends: str
) -> None:
    folder = tmp_path / "unit"
    folder.mkdir()
    shutil.copy(CONFTEST, tmp_path)
    (folder / "test_luck.py").write_text(LUCK.format(hasty=hasty, right=right))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "-ra",
        "--reruns",
        "1",
        "-p",
        "no:cacheprovider",
        str(folder),
    ]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=environ)
    assert done.returncode == code, done.stdout
    assert ends in done.stdout.splitlines()[-1]
    for number in range(hasty):
        assert f"AssertionError: too hasty: {number}" in done.stdout
    assert ("more than 3" in done.stdout) == (hasty > 3)
