"""Fixtures of the tests in checkpoints/."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_folders import FIRST, MIB
from weight_files import Net

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file


@pytest.fixture
def folder(tmp_path: Path, commit: Callable[..., Any]) -> Path:
    root = tmp_path / "ckpt"
    commit(root, 10, FIRST)
    commit(root, 20, {**FIRST, "model/b": b"x" * 7 * MIB})
    return root


@pytest.fixture
def model() -> Net:
    made = Net()
    torch.nn.init.normal_(made.norm.weight)
    return made
