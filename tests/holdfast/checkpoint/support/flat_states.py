"""States that several tests save."""

from __future__ import annotations

from typing import Any

import torch


class Box:
    """Anything with a state."""

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
