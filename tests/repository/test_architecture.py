"""Every path and every function that ARCHITECTURE.md names exists, and it names the folders of the packages."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/[\w.-]*|[\w-]+\.py")
FUNCTION = re.compile(r"(?P<module>(?:\w+/)+\w+)\.(?P<name>[A-Za-z_]\w*(?:\.\w+)?)")


def named(text: str) -> list[str]:
    """What the text shows as code and what is a path or a function: it has a slash, or ends in `.py`."""
    return sorted({code for code in re.findall(r"`([^`\n]+)`", text) if PATH.fullmatch(code)})


@cache
def files() -> tuple[str, ...]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(f"/{name}" for name in listed.split("\0") if name and (ROOT / name).exists())


def definitions(file: str) -> set[str]:
    """The functions, classes and methods of a module."""
    found = set()
    for node in ast.parse((ROOT / file.lstrip("/")).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def exists(code: str) -> bool:
    """Whether the code is a file, a folder, or a function in a module: each by the end of its path."""
    if code.endswith("/"):
        return any(f"/{code}" in file for file in files())
    if any(file.endswith(f"/{code}") for file in files()):
        return True
    match = FUNCTION.fullmatch(code)
    if match is None:
        return False
    modules = [file for file in files() if file.endswith(f"/{match['module']}.py")]
    return any(match["name"] in definitions(module) for module in modules)


@pytest.mark.parametrize(
    ("code", "there"),
    [
        ("reconcile/observe.py", True),
        ("checkpoint/policy/", True),
        ("training/job.Job.step", True),
        ("membership/quorum.may_be", True),
        ("reconcile/nothing.py", False),
        ("training/job.Job.nothing", False),
        ("membership/nothing.may_be", False),
        ("checkpoint/nothing/", False),
    ],
)
def test_names_are_looked_up(code: str, there: bool) -> None:
    assert exists(code) is there


def test_the_architecture_names_what_exists() -> None:
    codes = named((ROOT / "ARCHITECTURE.md").read_text())
    assert len(codes) > 100
    assert [code for code in codes if not exists(code)] == []


def test_the_architecture_names_the_folders_of_each_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    packages = ("operator/src/holdfast_operator", "sidecar/src/holdfast_sidecar", "trainer_lib/src/holdfast")
    inner = [Path(file).parent.relative_to(f"/{one}") for file in files() for one in packages if f"/{one}/" in file]
    folders = {path.as_posix() for path in inner if len(path.parts) in (1, 2)}
    assert len(folders) > 50
    assert sorted(one for one in folders if f"`{one}/" not in text) == []
