"""The recorded durations of the tests: each names a piece of work, and a piece that becomes slower is reported."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
PIECE = "tests/repository/test_durations.py"


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`tests/conftest.py` with a table of its own: this file takes ten seconds."""
    spec = importlib.util.spec_from_file_location("order_of_tests", TESTS / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    table = tmp_path / "durations.json"
    table.write_text(json.dumps({PIECE: 10}))
    monkeypatch.setattr(module, "DURATIONS", table)
    return module


def lines_of(order: ModuleType, seconds: float, *, record: bool = False) -> list[str]:
    durations = order.Durations(record)
    for _ in range(2):
        durations.pytest_runtest_logreport(SimpleNamespace(nodeid=f"{PIECE}::test_it[a/b]", duration=seconds / 2))
    lines: list[str] = []
    reporter: Any = SimpleNamespace(write_line=lines.append)
    durations.pytest_terminal_summary(reporter)
    return lines


def test_each_recorded_piece_exists() -> None:
    recorded = json.loads((TESTS / "durations.json").read_text())
    missing = [p for p in recorded if not (TESTS.parent / p).exists() and not (TESTS / p).is_dir()]
    assert missing == []


def test_a_piece_that_doubles_is_reported(order: ModuleType) -> None:
    assert lines_of(order, 19.0) == []
    [line] = lines_of(order, 21.0)
    assert PIECE in line


def test_a_run_is_recorded_where_that_is_asked_for(order: ModuleType) -> None:
    lines_of(order, 30.0)
    assert json.loads(order.DURATIONS.read_text()) == {PIECE: 10}
    lines_of(order, 30.0, record=True)
    assert json.loads(order.DURATIONS.read_text()) == {PIECE: 30}


def test_the_tests_of_a_cluster_are_one_piece(order: ModuleType) -> None:
    assert order.piece_of_work("tests/e2e/test_chart.py::test_it") == "e2e"
    assert order.piece_of_work("tests/holdfast/test_x.py::test_it") == "tests/holdfast/test_x.py"
