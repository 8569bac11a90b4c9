"""The chart's table of values is made from the comments of values.yaml."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "holdfast"
VALUES = """\
# About the file.

# Not of the table.
# -- A number.
count: 2
group:
  # -- A list. The default is
  # in `code`, with a | in it.
  items: ["a|b"]
  # -- One row.
  whole:
    x: 1
# -- Nothing.
empty: {}
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chart_values", ROOT / "tools" / "chart_values.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_value_is_a_row_with_its_default(tool: ModuleType) -> None:
    assert list(tool.rows(VALUES)) == [
        ("count", "`2`", "A number."),
        ("group.items", '`["a\\|b"]`', "A list. The default is in `code`, with a \\| in it."),
        ("group.whole", '`{"x": 1}`', "One row."),
        ("empty", "", "Nothing."),
    ]


def test_a_value_without_a_meaning_is_refused_by_name(tool: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"values.yaml:3: b\.c has no comment"):
        list(tool.rows("# -- A.\na: 1\nb: {c: 1}\n"))


def test_the_readme_has_the_table_that_the_generator_makes(tool: ModuleType) -> None:
    readme = (CHART / "README.md").read_text()
    assert tool.page(readme, (CHART / "values.yaml").read_text()) == readme, "run 'make generate'"
    with pytest.raises(SystemExit, match="no section"):
        tool.page("# A page", VALUES)
