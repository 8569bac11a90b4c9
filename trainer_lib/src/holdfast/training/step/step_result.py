"""The result of a step, for the script and for the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from holdfast.training.data import BadSample
from holdfast.training.guards.non_finite import Response
from holdfast.training.guards.spikes import Spike
from holdfast.training.protocol.step_ballot import Agreed


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of `job.step`. `committed` is True if the call ended a global batch and the optimizer applied it.

    A step that a lost peer undid has the reason `Retried`: the same samples are repeated. A rank that missed steps
    gets the newest `step` as committed, without a `loss`, because it did not take part.
    """

    committed: bool
    step: int
    loss: float | None = None
    grad_norm: float | None = None
    group_norms: Mapping[str, float] = field(default_factory=dict)
    """The part of `grad_norm` of each parameter group of the optimizer, on request, by its name or its index."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """A step that was applied or skipped, and the values that the ranks agreed on."""

    result: StepResult
    agreed: Agreed
    world_size: int
    """The number of ranks of the world that made the step, which may have ended since."""
    response: Response | None = None
    """The response to a step that is not finite. None for any other step, and for an overflow of the scaler."""
    non_finite_weight: str = ""
    bad_samples: tuple[BadSample, ...] = ()
    """The samples of all ranks that could not be read in this step."""
    spike: Spike | None = None


def group_names(optimizer: torch.optim.Optimizer | None) -> list[str]:
    """Return the names of an optimizer's parameter groups.

    A group without a `name` has its index. If two names are equal, all groups have their indices.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    names = [str(group.get("name", index)) for index, group in enumerate(groups)]
    return names if len(set(names)) == len(names) else [str(index) for index in range(len(names))]
