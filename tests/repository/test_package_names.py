"""A module replaces the attribute of its name in its package, as soon as anything imports it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(
    path
    for folder in ("operator", "sidecar", "trainer_lib", "testbed")
    for path in (ROOT / folder / "src").rglob("__init__.py")
)


def public_names(init: Path) -> set[str]:
    tree = ast.parse(init.read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    exported = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    ]
    return functions.union(*exported)


@pytest.mark.parametrize("init", PACKAGES, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_no_module_hides_a_public_name_of_its_package(init: Path) -> None:
    modules = {path.stem for path in init.parent.glob("*.py")} | {
        path.parent.name for path in init.parent.glob("*/__init__.py")
    }

    assert public_names(init) & modules == set()
