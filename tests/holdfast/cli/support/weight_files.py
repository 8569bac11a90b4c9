"""Weights in files of other formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast import checkpoint
from holdfast.cli.main import main

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file


class Net(torch.nn.Module):
    """Tied weights, bf16, an empty tensor and a scalar."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(64, 16)
        self.head = torch.nn.Linear(16, 64, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(16, dtype=torch.bfloat16)
        self.body = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("none", torch.zeros(0, 5))
        self.register_buffer("count", torch.tensor(12345678901))


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def run(*words: object) -> int:
    return main(["checkpoints", *map(str, words)])


def loaded(folder: Path) -> Net:
    fresh = Net(seed=9)
    assert checkpoint.load(folder, model=fresh) is not None
    return fresh


# Import


def as_pt(model: Net, path: Path) -> Path:
    torch.save(model.state_dict(), path / "w.pt")
    return path / "w.pt"


def as_safetensors(model: Net, path: Path) -> Path:
    from safetensors.torch import save_file

    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path / "w.safetensors")
    return path / "w.safetensors"


def one(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}
