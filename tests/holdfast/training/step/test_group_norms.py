"""Gradient norms of the optimizer's parameter groups: those of torch, before clipping, of a complete global batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import holdfast
from holdfast.training.step.step_result import group_names

Make = Callable[..., Any]
STEPS, BATCH, LIMIT = 4, 4, 0.05


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))


def optimizer(net: torch.nn.Sequential) -> torch.optim.SGD:
    groups = [{"params": [*part.parameters()]} for part in net]
    return torch.optim.SGD([{**groups[0], "name": "body"}, groups[1]], lr=0.01)


def wanted(order: list[torch.Tensor]) -> list[dict[str, float]]:
    """Train with torch alone, on complete batches."""
    net = model()
    steps, found = optimizer(net), []
    for batch in order:
        steps.zero_grad()
        net(batch).square().mean().backward()
        norms = [float(torch.nn.utils.get_total_norm([one.grad for one in part.parameters()])) for part in net]
        found.append(dict(zip(("body", "1"), norms, strict=True)))
        torch.nn.utils.clip_grad_norm_(net.parameters(), LIMIT)
        steps.step()
    return found


def trained(run: Any, *, micro_batch: int, **more: Any) -> tuple[list[holdfast.StepResult], list[torch.Tensor]]:
    """Train with Holdfast. Return the results of completed steps, and the global batches."""
    net = model()
    run.job.manage(model=net, optimizer=optimizer(net), max_grad_norm=LIMIT, **more)
    results, batches, parts = [], [], []
    data = torch.randn(STEPS * BATCH, 3, generator=torch.Generator().manual_seed(1))
    for batch in run.job.batches(data, global_batch_size=BATCH, micro_batch_size=micro_batch, max_steps=STEPS):
        parts.append(batch)
        result = run.job.step(net(batch).square().mean())
        if result.committed:
            results.append(result)
            batches.append(torch.cat(parts))
            parts.clear()
        else:
            assert result.group_norms == {}
    return results, batches


@pytest.mark.parametrize("scale", [None, 2.0**12])
@pytest.mark.parametrize("micro_batch", [BATCH, 1])
def test_norms_are_those_of_torch(solo: Make, micro_batch: int, scale: float | None) -> None:
    """Accumulation, the scale of the loss and clipping do not change them."""
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    results, batches = trained(solo(None), micro_batch=micro_batch, group_norms=True, scaler=scaler)
    found = [dict(result.group_norms) for result in results]
    assert found == [pytest.approx(one, rel=1e-5) for one in wanted(batches)]
    assert [result.grad_norm for result in results] == pytest.approx([math.hypot(*one.values()) for one in found])
    assert min(result.grad_norm or 0.0 for result in results) > LIMIT


def test_norms_have_no_effect(solo: Make) -> None:
    (without, _), (with_norms, _) = (trained(solo(None), micro_batch=2, group_norms=on) for on in (False, True))
    assert {len(one.group_norms) for one in without} == {0}
    assert [(one.loss, one.grad_norm) for one in without] == [(one.loss, one.grad_norm) for one in with_norms]


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        ([{}, {}], ["0", "1"]),
        ([{"name": "decay"}, {}], ["decay", "1"]),
        ([{"name": "same"}, {"name": "same"}], ["0", "1"]),
        ([{"name": "1"}, {}], ["0", "1"]),
    ],
)
def test_groups_have_names_or_indices(groups: list[dict[str, Any]], names: list[str]) -> None:
    made = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], **group} for group in groups])
    assert group_names(made) == names


def test_without_an_optimizer_there_is_no_group() -> None:
    assert group_names(None) == []
