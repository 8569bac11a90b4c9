"""The kind of a command and the imports of its script are found without running anything."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from holdfast.launcher.process.script_imports import (
    Import,
    Script,
    imports,
    installed_imports,
    parse,
    reads_rank_variables,
    source_file,
    speaks,
)


def _script(
    target: str, *, options: tuple[str, ...] = (), module: bool = False, rest: tuple[str, ...] = ()
) -> Script:
    return Script(interpreter="python3", options=options, target=target, is_module=module, arguments=rest)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("python3 train.py", _script("train.py")),
        ("python3 train.py --lr 3 -u", _script("train.py", rest=("--lr", "3", "-u"))),
        ("python3 -u -m pkg.train x", _script("pkg.train", options=("-u",), module=True, rest=("x",))),
        ("python3 -um pkg", _script("pkg", options=("-u",), module=True)),
        ("python3 -mpkg", _script("pkg", module=True)),
        ("python3 -W error -Xdev -uB a.py", _script("a.py", options=("-W", "error", "-Xdev", "-uB"))),
    ],
)
def test_a_script_or_module_is_recognised(words: str, expected: Script) -> None:
    assert parse(words.split()) == expected


@pytest.mark.parametrize(
    "words",
    [
        "",
        "bash train.sh",
        "torchrun train.py",
        "python3",
        "python3 -",
        "python3 -c pass",
        "python3 -i train.py",
        "python3 -V",
        "python3 -W",
        "python3 --check-hash-based-pycs always train.py",
    ],
)
def test_anything_else_is_not(words: str) -> None:
    assert parse(words.split()) is None


@pytest.mark.parametrize(
    "source",
    [
        "import holdfast\njob = holdfast.init()",
        "import holdfast as hf\ndef main():\n    hf.init(resume='Never')",
        "import holdfast.training.options.config\nholdfast.init()",
        "from holdfast import init as join\njoin()",
        "from holdfast import Trainer\nclass Mine(Trainer): ...",
        "def main():\n    import holdfast\n    holdfast.Trainer().run()",
    ],
)
def test_a_script_that_uses_the_loop_speaks_holdfast(tmp_path: Path, source: str) -> None:
    (tmp_path / "train.py").write_text(source)
    assert speaks([sys.executable, str(tmp_path / "train.py")])


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "import holdfast\nholdfast.checkpoint.load('x')",
        "from holdfast import init",
        "init()",
        "# holdfast.init()\ntext = 'holdfast.init()'",
        "import holdfast\nholdfast.init(",
        "\0",
    ],
)
def test_script_without_the_loop_or_unreadable_does_not(tmp_path: Path, source: str) -> None:
    (tmp_path / "train.py").write_text(source)
    assert not speaks([sys.executable, str(tmp_path / "train.py")])


def test_no_file_and_no_script_do_not_speak(tmp_path: Path) -> None:
    assert not speaks([sys.executable, str(tmp_path / "absent.py")])
    assert not speaks(["bash", "-c", "holdfast.init()"])


def test_a_module_is_found_without_importing_its_package(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not run')")
    (package / "train.py").write_text("import holdfast")
    (package / "__main__.py").write_text("")
    assert source_file(_script("pkg.train", module=True), [str(tmp_path)]) == package / "train.py"
    assert source_file(_script("pkg", module=True), [str(tmp_path)]) == package / "__main__.py"
    assert source_file(_script("pkg.none", module=True), [str(tmp_path)]) is None


def test_a_script_that_names_its_place_itself_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import os\nlocal = int(os.environ['LOCAL_RANK'])")
    (tmp_path / "ours.py").write_text("import holdfast\nprint(holdfast.init().rank)  # RANK")
    assert reads_rank_variables([sys.executable, str(tmp_path / "own.py")])
    assert not reads_rank_variables([sys.executable, str(tmp_path / "ours.py")])


def test_imports_are_those_of_the_module_level() -> None:
    source = """
import torch, numpy as np
from torch import nn, optim
from . import neighbour
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import never
if True:
    import a.b
try:
    import c
except ImportError:
    import never
else:
    from d import *
def main():
    import never
"""
    assert imports(source) == (
        Import(module="torch"),
        Import(module="numpy"),
        Import(module="torch", names=("nn", "optim")),
        Import(module="typing", names=("TYPE_CHECKING",)),
        Import(module="a.b"),
        Import(module="c"),
        Import(module="d"),
    )


def test_user_files_are_followed_but_do_not_count_themselves(tmp_path: Path) -> None:
    """This includes relative imports, packages, and a cycle."""
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("import json")
    (package / "model.py").write_text("from .layers import Layer\nfrom . import data\nimport torch.nn as nn")
    (package / "layers.py").write_text("from numpy import ndarray\nfrom mine import model")
    (package / "data.py").write_text("import decimal")
    (tmp_path / "train.py").write_text("from mine.model import Net\nimport absent")
    path = [str(tmp_path), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]
    assert installed_imports(tmp_path / "train.py", path) == (
        Import(module="json"),
        Import(module="numpy", names=("ndarray",)),
        Import(module="decimal"),
        Import(module="torch.nn"),
    )
