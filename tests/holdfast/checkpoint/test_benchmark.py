"""The benchmark of checkpoints: its rows from canned seconds, and that a quick run measures all of them."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent.parent
BARS = {f"checkpoint-{number}" for number in (*range(1, 8), 12)}
# Where a peer is not installed, or no network namespace can be created, a row says so.
OPTIONAL = {"", "checkpoint-peer", "object-upload", "object-save", "object-restore"}
ROUNDS = {"limit": [1.0, 1.0, 2.0], "dcp": [4.0, 4.0, 8.0]}


@pytest.fixture(scope="module")
def programs() -> Iterator[Any]:
    """Import a module of the benchmark by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module


def test_stalls_and_saves_are_judged_by_their_ratio_to_the_limit(programs: Any) -> None:
    program = programs("checkpoint")
    good, slow = [1.0, 1.1, 2.4], [1.3, 1.3, 2.6]
    first, later = program.stalls({"ours": slow, "first": good, **ROUNDS}, "1 GB of fp32")
    assert (first.bar, first.what, first.held) == ("checkpoint-1", "stall of a save of 1 GB of fp32", False)
    assert (later.ours, later.p10, later.p90, later.n) == (1.1, 1.0, 1.2, 3)
    assert (later.peer, later.peer_name, later.limit, later.held) == (4.0, "DCP", 1.0, True)
    others = {name: [2.0, 2.0, 4.0] for name in ("through", "safetensors", "torch.save")}
    rows = program.saves({"ours": good, **others, **ROUNDS}, "1 GB of bf16")
    assert [(row.bar, row.held) for row in rows] == [
        ("checkpoint-2", True),
        ("checkpoint-2", True),
        ("", None),
        ("", None),
        ("", None),
    ]
    assert all(row.n == 3 and row.p10 <= row.ours <= row.p90 and "bf16" in row.what for row in rows)


def test_restores_are_judged_against_the_disk_and_dcp(programs: Any) -> None:
    module = programs("_checkpoint.restore")
    walls = {
        **ROUNDS,
        "ours": [1.1, 1.2, 2.4],
        "through": [1.3, 1.3, 2.6],
        "limit of through": [1.0, 1.0, 2.0],
        module.TAKEN: [2.0, 2.0, 4.0],
        **{name: [3.0, 3.0, 6.0] for name in module.FILES},
    }
    rows = module.cold_rows(walls, "restore")
    assert [(row.what, row.held) for row in rows if row.bar] == [
        ("restore, into fresh memory", True),
        ("restore, into fresh memory: over DCP", True),
        ("restore, into tensors that are there (dcp.load with our StorageReader)", False),
        ("restore, into tensors that are there (dcp.load with our StorageReader): over DCP", True),
    ]
    cpu, grown = ({name: [used] for name in ("ours", "through", "dcp")} for used in (2.0, 3e9))
    costs = list(module.costs(cpu, grown, 1_000_000_000, "1 GB"))
    assert [(row.bar, row.ours, row.unit, row.peer, row.held) for row in costs] == [
        ("checkpoint-3", 2.0, "s/GB", 2.0, None),
        ("checkpoint-3", 3.0, "x state", 3.0, None),
    ] * 2


def test_rows_of_memory_and_of_the_object_store_name_their_limits(programs: Any) -> None:
    memory, store = programs("_checkpoint.memory"), programs("_checkpoint.object")
    values = {"restore": [1.5], "in place": [2.0], "save": [3.0], "copy": [1.0]}
    rows = memory.near_rows("1 GB", values)
    assert [(row.bar, row.held) for row in rows] == [("checkpoint-4", True), ("checkpoint-4", False), ("", None)]
    given = {"give": [1.2], "send": [1.0], "restore": [1.4], "receive": [1.0]}
    assert [row.held for row in memory.copies("1 GB", given, "5gbit")] == [True, False]
    row = store._row("upload", "upload of 1 GB", {"ours": [1.1], "boto3": [2.0], "CRT": [1.0]}, "<= 1.2")
    assert (row.bar, row.peer_name, row.held) == ("object-upload", "CRT", True)
    assert row.what == "upload of 1 GB (CRT 1.00 s, boto3 2.00 s, ours 1.10 s)"


@pytest.mark.thorough
def test_a_quick_run_measures_every_bar() -> None:
    """A change of the library's modules can break only the measuring, which canned values do not call."""
    command = [sys.executable, str(ROOT / "benchmarks" / "checkpoint.py"), "--quick"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert run.returncode == 0, run.stderr
    rows = json.loads((ROOT / "out" / "bench" / "checkpoint.quick.json").read_text())["rows"]
    assert BARS <= {row["bar"] for row in rows} <= BARS | OPTIONAL
    assert all(row["n"] > 0 for row in rows if row["bar"] in BARS)
    assert {dtype for dtype in ("fp32", "bf16") for row in rows if dtype in row["what"]} == {"fp32", "bf16"}
