"""The sidecar's benchmark: its rows from canned values, and that a quick run measures all of them."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
BARS = {f"sidecar-{number}" for number in (1, 2, 3, 4)}
SIZES = {"ours": [30.0, 40.0], "resident": [50.0, 70.0], "limit": [10.0, 10.0]}


@pytest.fixture(scope="module")
def program():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("sidecar")


def test_every_row_has_its_bar_and_is_judged_by_its_target(program):
    notices = {what: [2.0] * 98 + [2.1, 9.0] for what in program.NOTICES}
    rows = program.rows({**SIZES, "peer": [90.0, 80.0]}, [4.0], [8.0], [0.1] * 9 + [0.6], notices)
    assert {row.bar for row in rows} == BARS
    assert all(row.n > 0 and row.p10 <= row.p90 for row in rows)
    assert all((row.held is None) == (row.target == "") for row in rows)
    by_what = {row.what: row for row in rows}
    pss = by_what["memory with everything in use (PSS)"]
    assert (pss.ours, pss.held, pss.peer, pss.peer_name, pss.limit) == (30.0, True, 85.0, program.PEER_NAME, 10.0)
    assert by_what["PSS over the bare interpreter"].peer == 8.5
    assert by_what["publication → membership.json, p99"].held is False, "the slowest of ten is the p99"
    took = by_what["GCP preemption → touch-file, p99 (poll 2 s)"]
    assert (took.ours, took.held) == (2.1, True), "of a hundred, the slowest is beyond the p99"


def test_a_peer_that_is_not_installed_is_named(program):
    rows = program.rows(SIZES, [4.0], [8.0], [0.1], {})
    assert {row.peer_name for row in rows if row.limit} == {"kubernetes or requests is not installed"}
    assert all(row.peer is None for row in rows)


@pytest.mark.thorough
def test_a_quick_run_measures_every_bar():
    """A change of the sidecar or the agents' API can break only the measuring, which canned values do not call."""
    command = [sys.executable, str(ROOT / "benchmarks" / "sidecar.py"), "--quick"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert run.returncode == 0, run.stderr
    found = json.loads((ROOT / "out" / "bench" / "sidecar.quick.json").read_text())
    assert {row["bar"] for row in found["rows"]} == BARS
    assert all(row["n"] > 0 for row in found["rows"])
