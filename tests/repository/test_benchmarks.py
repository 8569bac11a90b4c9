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


def canned_guards(steady: Any, trials: Any, *, comparison: float = 0.02) -> None:
    """Keep three blocks as ranks write them: the guards take 1, 2 and 2.2 % of a step."""
    for ours in (1.01, 1.02, 1.022):
        lines = [
            {"name": "guards", "wall": [0.2 * ours, 0.2], "cpu": [0.1 * ours, 0.1]},
            {"name": "guards", "values": {"own": 0.001, "norm": 0.00101, "step": 0.101}},
            {"name": "comparison", "values": {"wall": comparison, "cpu": comparison / 2}},
            {
                "name": "save",
                "values": {
                    "stall checked": 0.03,
                    "stall unchecked": 0.01,
                    "durable checked": 0.12,
                    "durable unchecked": 0.1,
                    "cpu checked": 0.05,
                    "cpu unchecked": 0.04,
                },
            },
        ]
        for line in lines:
            steady.keep("3.7 M", line, trials)


def test_the_guards_are_judged_by_their_part_of_a_step_and_of_a_comparison(bench: Any) -> None:
    steady = importlib.import_module("steady")
    judged = {}
    for comparison in (0.02, 0.5):
        trials = bench.Trials("x", bench.Effort(quick=False, full=False))
        canned_guards(steady, trials, comparison=comparison)
        rows = steady.guards.rows("3.7 M", "3.7 M parameters", trials)
        judged[comparison] = {row.what: (round(row.ours, 4), row.held) for row in rows}
    step, other = "with guards ÷ without, 3.7 M parameters", "3.7 M parameters"
    assert judged[0.02] == {
        step: (1.0205, False),
        f"{step}: 95 % bound of the mean": (1.0253, None),
        f"{step}: CPU time": (1.0205, None),
        f"calls of the guards, {other}": (1.05, None),
        f"calls of the guards, {other}: the norm of the gradients alone": (1.0, None),
        f"one comparison of replicas, {other}": (20.0, None),
        f"one comparison in 200 steps, {other}": (0.05, True),
        f"a step without guards, {other}": (200.0, None),
        f"stall of a save by 2 ranks, with guards ÷ without, {other}": (3.0, None),
        f"stall of a save by 2 ranks, with guards − without, {other}": (20.0, None),
        f"save by 2 ranks until it is durable, with guards ÷ without, {other}": (1.2, None),
        f"save by 2 ranks until it is durable, with guards − without, {other}": (20.0, None),
        f"save by 2 ranks: CPU time of a rank, with guards ÷ without, {other}": (1.25, None),
        f"save by 2 ranks: CPU time of a rank, with guards − without, {other}": (10.0, None),
    }
    assert judged[0.5][f"one comparison in 200 steps, {other}"] == (1.25, False)


def test_a_quick_run_of_steady_has_rows_of_ddp_and_of_guards(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steady = importlib.import_module("steady")

    def blocks(shape: str, blocks: int, names: list[str], trials: Any) -> None:
        for name in names * blocks:
            steady.keep(shape, {"name": name, "wall": [0.2, 0.2], "cpu": [0.1, 0.1]}, trials)

    monkeypatch.setattr(bench, "arguments", lambda _: bench.Effort(quick=True, full=False))
    monkeypatch.setattr(steady, "measure", blocks)
    monkeypatch.setattr(steady, "measure_guards", lambda shape, blocks, trials: canned_guards(steady, trials))
    assert steady.main() == 0
    rows = json.loads((bench.OUT / "steady.quick.json").read_text())["rows"]
    assert {row["bar"] for row in rows} == {"recovery-8", "guards"}
    assert [row["peer_name"] for row in rows if row["what"] == "torchft ÷ DDP"] == ["left out of --quick"]


@pytest.mark.thorough
def test_two_ranks_train_and_save_with_and_without_guards(bench: Any) -> None:
    """A change of the guards' names can break only the measuring, which canned values do not call."""
    steady = importlib.import_module("steady")
    trials = bench.Trials("x", bench.Effort(quick=True, full=False))
    steady.measure_guards("3.7 M", 1, trials)
    rows = steady.guards.rows("3.7 M", "3.7 M parameters", trials)
    assert all(row.n == 1 for row in rows)
    assert all(row.ours > 0 for row in rows if "−" not in row.what)


@pytest.mark.thorough
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_it_says_what_it_measures_and_how_much(program: Path) -> None:
    """A change of a module that the program imports would otherwise break it without notice."""
    done = subprocess.run([sys.executable, str(program), "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout
    assert "--full" in done.stdout
