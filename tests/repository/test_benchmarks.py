"""Benchmarks print and judge canned rounds as documented, and every benchmark and drill can be started."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = [path for folder in ("benchmarks", "drills") for path in sorted((ROOT / folder).glob("[!_]*.py"))]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The common parts of benchmarks, which write into the test's folder."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("_bench")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "OUT", tmp_path / "out" / "bench")
    return module


def rows(bench: Any, *values: float) -> list[Any]:
    """Return a judged row with these values, one that is not judged, and one without a figure."""
    return [
        bench.measured("x-1", "stall", values, "s", target="<= 2", peer=4.0, peer_name="DCP", limit=1.0),
        bench.measured("", "size", [1234.5], "MiB"),
        bench.not_measured("x-2", "copy", "no network namespace"),
    ]


def test_the_table_shows_figures_peer_limit_and_verdict(bench: Any) -> None:
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in bench.table(rows(bench, 1, 3)).splitlines()]
    assert lines[0] == ["bar", "what", "ours", "p10–p90", "peer", "limit", "target", "held", "n"]
    assert lines[2:] == [
        ["x-1", "stall", "1 s", "1–3", "4 (DCP)", "1", "<= 2", "yes", "2"],
        ["", "size", "1234 MiB", "1234–1234", "—", "—", "—", "—", "1"],
        ["x-2", "copy", "—", "—", "no network namespace", "—", "—", "—", "0"],
    ]
    assert "| NO " in bench.table(rows(bench, 3, 3))


def test_the_file_holds_every_row_and_null_for_a_missing_figure(bench: Any, capsys: Any) -> None:
    assert bench.finish("x", rows(bench, 1, 3), bench.Effort(quick=False, full=False)) == 0
    found = json.loads((bench.OUT / "x.json").read_text())
    assert (found["name"], found["quick"], len(found["rows"])) == ("x", False, 3)
    assert (found["rows"][0]["ours"], found["rows"][0]["held"]) == (1, True)
    assert (found["rows"][2]["ours"], found["rows"][2]["peer_name"]) == (None, "no network namespace")
    assert f"Python {found['machine']['python']}; {found['date']}; out/bench/x.json" in capsys.readouterr().out


@pytest.mark.parametrize(("quick", "file", "status"), [(False, "x.json", 1), (True, "x.quick.json", 0)])
def test_a_missed_target_fails_a_run_unless_it_is_quick(
    bench: Any, capsys: Any, quick: bool, file: str, status: int
) -> None:
    assert bench.finish("x", rows(bench, 3), bench.Effort(quick=quick, full=False)) == status
    assert json.loads((bench.OUT / file).read_text())["rows"][0]["held"] is False
    assert ("--quick: the figures are not judged" in capsys.readouterr().out) is quick


def test_quantiles_are_values_that_occurred(bench: Any) -> None:
    hundred = list(range(1, 101))
    assert [bench.quantile(hundred, at) for at in (0.1, 0.5, 0.99)] == [10, 50, 99]
    assert bench.quantile([7.0], 0.99) == 7.0
    assert [bench.meets(2.0, target) for target in ("<= 2", "< 2", ">= 2", "> 2", "")] == [
        True,
        False,
        True,
        False,
        None,
    ]


def test_contestants_take_turns_and_the_warm_up_round_is_dropped(bench: Any) -> None:
    calls: list[str] = []

    def of(name: str) -> Any:
        return lambda: calls.append(name) or float(calls.count(name))

    values = bench.interleaved({"ours": of("ours"), "limit": of("limit")}, 3, rng=random.Random(1))
    assert values == {"ours": [2.0, 3.0, 4.0], "limit": [2.0, 3.0, 4.0]}
    assert all(set(calls[at : at + 2]) == {"ours", "limit"} for at in range(0, 8, 2))
    assert bench.ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]


def test_a_full_run_continues_where_it_was_stopped(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "code", lambda: "abc")
    full = bench.Effort(quick=False, full=True)
    assert bench.Trials("x", full).collect("idle", 2, lambda: 1.0) == [1.0, 1.0]
    assert bench.Trials("x", full).collect("idle", 3, lambda: 2.0) == [1.0, 1.0, 2.0]
    monkeypatch.setattr(bench, "code", lambda: "other")
    assert bench.Trials("x", full).values("idle") == [], "values of other code are not kept"


@pytest.mark.thorough
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_it_says_what_it_measures_and_how_much(program: Path) -> None:
    """A change of a module that the program imports would otherwise break it without notice."""
    done = subprocess.run([sys.executable, str(program), "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout
    assert "--full" in done.stdout
