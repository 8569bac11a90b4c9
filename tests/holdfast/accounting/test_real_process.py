"""The books of a real process, against clocks that it reads itself just inside and just outside of each activity."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.accounting import Spent
from holdfast.activity import Activity

SCRIPT = Path(__file__).parent / "scripts" / "keeps_books.py"
CAUSES = {
    Spent.STARTUP: [Activity.SYNC],
    Spent.DATA: [Activity.DATA],
    Spent.CHECKPOINT: [Activity.CHECKPOINT],
    Spent.EVALUATION: [Activity.EVALUATION],
    Spent.PRODUCTIVE: [Activity.COMPUTE, Activity.AVERAGE, Activity.VOTE, Activity.APPLY],
}


@pytest.mark.parametrize("slow", [Activity.SYNC, Activity.DATA, Activity.COMPUTE, Activity.CHECKPOINT])
def test_what_a_process_slept_through_is_booked_on_its_cause(slow: Activity) -> None:
    done = subprocess.run([sys.executable, SCRIPT, slow, "0.2"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    report, seconds = told["report"], told["report"]["seconds"]
    for cause, activities in CAUSES.items():
        least = sum(told["within"][activity] for activity in activities)
        most = sum(told["without"][activity] for activity in activities)
        assert least - 1e-4 <= seconds[cause] <= most + 1e-4, cause
    booked = sum(seconds.values()) + report["open"]
    assert abs(report["wall"] - booked) <= 0.01 * report["wall"]
    assert report["wall"] <= told["wall"]
