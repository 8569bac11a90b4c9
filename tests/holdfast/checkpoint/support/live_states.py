"""Models and states for several tests of saving and loading."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed


def net(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Sequential(torch.nn.BatchNorm1d(8)), torch.nn.Linear(8, 1)
    ).to(dtype)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(6, 4, dtype=dtype)).square().mean().backward()
        optimizer.step()


def same(one: Any, other: Any) -> bool:
    """Compare bit by bit, including dtypes and types."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Values:
    """An object of a user."""

    def __init__(self, state: Any, refuses: BaseException | None = None) -> None:
        self.state = state
        self.refuses = refuses

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
        if self.refuses:
            raise self.refuses


# Without memory


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 3)
        self.head = torch.nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(3)


# Misfits


def state_of(objects: dict[str, Any]) -> Any:
    return copy.deepcopy({name: thing.state_dict() for name, thing in objects.items()})


class Box:
    """An object with a state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)).to(
        torch.float64
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
    ]
    return model, optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[3])
