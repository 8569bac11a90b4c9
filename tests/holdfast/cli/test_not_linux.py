"""On systems other than Linux, everything except process supervision works. The test deletes the names of Linux."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "scripts" / "not_linux.py"


def test_everything_imports_and_linux_only_parts_fail_clearly(tmp_path: Path) -> None:
    """The error names what needs Linux, and why."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "tier")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "needs Linux" in line]
    assert said == [
        f"holdfast {verb} needs Linux, because it supervises processes with prctl and pidfd, and this system is "
        "darwin: run it on a Linux host or in a Linux container"
        for verb in ("run", "demo", "chaos", "resume-check")
    ]
