from __future__ import annotations

import torch

from holdfast.training.guards.first_module import FirstModule


class Spoil(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        return {"out": [x, x / 0.0]}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.spoil = Spoil()
        self.outer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(self.spoil(self.inner(x))["out"][1])
        return out


def test_first_module_in_the_order_of_the_forward_pass_is_named() -> None:
    model = Net()
    watch = FirstModule({"model": model, "other": 3})
    watch.arm()
    assert watch.armed
    model(torch.ones(1, 2))
    assert watch.name == "model.spoil (Spoil)"


def test_disarmed_watch_leaves_no_hooks() -> None:
    model = Net()
    watch = FirstModule({"model": model})
    watch.arm()
    watch.disarm()
    model(torch.ones(1, 2))
    assert (watch.name, watch.armed) == ("", False)
    assert not any(part._forward_hooks for part in model.modules())


def test_compiled_model_is_not_watched() -> None:
    model = Net()
    model.compile(backend="eager")
    watch = FirstModule({"model": model})
    watch.arm()
    assert not watch.armed
