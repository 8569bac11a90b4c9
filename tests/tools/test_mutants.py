"""Which changes of the sources the sample can contain, and how one is judged."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = """\
LIMIT = 3


def f(x: int = 0) -> bool:
    'Größe.'
    return not (x < 1 and f"é{x + 1}") or x in (LIMIT,)
"""


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", Path(__file__).parents[2] / "tools" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module
    spec.loader.exec_module(module)
    return module


def test_each_mutation_changes_one_expression_of_a_function(mutants: ModuleType) -> None:
    changed = {f"{one.before} → {one.after}" for one in mutants.mutations("a.py", SOURCE)}
    assert {"x < 1 → (x <= 1)", "1 → (2)", "x in (LIMIT,) → (x not in (LIMIT,))"} <= changed
    assert not any(one.startswith(("x + 1 ", "3 ", "0 ")) for one in changed)


def test_a_mutated_file_is_a_program_and_differs(
    mutants: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    for folder in (original, copy):
        folder.mkdir()
    (original / "a.py").write_text(SOURCE)
    monkeypatch.setattr(mutants, "ROOT", original)
    for one in mutants.mutations("a.py", SOURCE):
        one.apply(copy)
        assert ast.dump(ast.parse((copy / "a.py").read_text())) != ast.dump(ast.parse(SOURCE))
        one.undo(copy)
        assert (copy / "a.py").read_text() == SOURCE


def test_a_sample_is_repeatable_and_its_tests_exist(mutants: ModuleType) -> None:
    drawn = mutants.sample(50, 7)
    assert drawn == mutants.sample(50, 7)
    assert len(set(drawn)) == 50
    assert all((mutants.ROOT / tests).exists() for one in drawn for tests in mutants.tests_of(one.file))


@pytest.mark.parametrize(
    ("failing", "part"), [("not thorough", "make test"), ("thorough", "make test-thorough"), ("", "no test")]
)
def test_the_part_that_fails_first_detects_a_mutation(
    mutants: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, part: str
) -> None:
    (one,) = mutants.sample(1, 1)
    (tmp_path / one.file).parent.mkdir(parents=True)
    monkeypatch.setattr(mutants, "passes", lambda _folder, _tests, marks: marks != failing)
    assert mutants.detected_by(one, tmp_path) == part
    assert (tmp_path / one.file).read_bytes() == (mutants.ROOT / one.file).read_bytes()
