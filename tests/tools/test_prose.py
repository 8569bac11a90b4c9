"""What the check of prose finds, and what it leaves alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

LONG = " ".join(["word"] * 31)


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose", Path(__file__).parents[2] / "tools" / "prose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "text", "line", "what"),
    [
        ("a.md", "# Title\n\nThe pod is\nmended soon.", 3, "'mended'"),
        ("a.md", f"- {LONG}.", 1, "31 words"),
        ("a.md", "| field | Nobody reads it |", 1, "'Nobody'"),
        ("a.yaml", "spec:\n  description: The pod is not heard of.", 2, "'heard of'"),
        ("a.yaml", "- description: >-\n    The pod is\n    mended.\n  beside: 1", 1, "'mended'"),
        ("a.py", "parser.add_argument('x',\n    help='begin anew')", 2, "'anew'"),
        ("a.py", "x: int = setting(1, int, 'nobody', flag='--x')", 1, "'nobody'"),
        ("a.py", "CHAOS_HELP = 'a rank is hurt'", 1, "'hurt'"),
        ("values.yaml", "# -- Runs beside the pod.\nkey: 1", 1, "'beside'"),
    ],
)
def test_problem_is_found_with_its_line(prose: ModuleType, name: str, text: str, line: int, what: str) -> None:
    (found,) = prose.problems(name, text)

    assert found.startswith(f"{name}:{line}: ")
    assert what in found


@pytest.mark.parametrize(
    "text",
    ["```\nmended\n```", "The field `beside` is set.", f"Two sentences. {' '.join(['word'] * 29)}.", "[x](anew.md)"],
)
def test_code_and_short_sentences_are_left_alone(prose: ModuleType, text: str) -> None:
    assert list(prose.problems("a.md", text)) == []
    assert list(prose.problems("a.py", f"print({text!r})")) == []
