"""The ledger of a real process, compared with clocks that it reads just inside and just outside of each activity."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import timeline as timeline_view
from holdfast.telemetry.activity import Activity
from holdfast.telemetry.rank_time import Spent

SCRIPTS = Path(__file__).parent / "scripts"
CAUSES = {
    Spent.STARTUP: [Activity.SYNC],
    Spent.DATA: [Activity.DATA],
    Spent.CHECKPOINT: [Activity.CHECKPOINT],
    Spent.EVALUATION: [Activity.EVALUATION],
    Spent.PRODUCTIVE: [Activity.COMPUTE, Activity.AVERAGE, Activity.VOTE, Activity.APPLY],
}


@pytest.mark.parametrize("slow", [Activity.SYNC, Activity.DATA, Activity.COMPUTE, Activity.CHECKPOINT])
def test_what_a_process_slept_through_is_booked_on_its_cause(slow: Activity) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "keeps_books.py", slow, "0.2"], capture_output=True, text=True, timeout=240
    )
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


def test_killed_rank_and_its_replacement_time_are_accounted(
    tmp_path: Path,
) -> None:
    timeline = tmp_path / "what happened.jsonl"
    command = [sys.executable, "-m", "holdfast", "run", "--timeline", str(timeline), "--"]
    environ = {"PATH": os.environ["PATH"], "HOLDFAST_RUN_DIR": str(tmp_path)}
    environ |= {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
    done = subprocess.run(
        [*command, sys.executable, str(SCRIPTS / "tells_books.py")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "status.json").read_text())["accounting"]
    assert (told["steps"], told["lostSteps"], told["failures"]) == (8, 0, 1)
    assert abs(told["unattributedSeconds"]) <= 0.01 * told["wallSeconds"]
    assert told["seconds"]["productive"] >= 8 * 0.5
    assert told["seconds"]["recompute"] >= float((tmp_path / "wasted").read_text()) - 1e-6
    assert told["seconds"]["restart"] > 0
    assert {known["phase"] for known in told["recoveries"]} == {"detection", "restart", "sync", "step"}
    story = timeline_view.read(timeline)
    kinds = [entry["kind"] for entry in story.entries if entry["kind"] != "step"]
    assert kinds == ["start", "world", "failure", "world", "recovery", "end"]
    assert story.skipped == 0
