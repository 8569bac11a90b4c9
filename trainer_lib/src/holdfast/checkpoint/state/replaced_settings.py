"""Settings of a script that a checkpoint replaces.

An optimizer and a scheduler load a complete saved state, including its settings. A script that sets another weight
decay, or a longer schedule, continues with the old ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from holdfast.checkpoint.state import optimizer_state

KINDS: Final = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
"""The types that have settings in their state."""
# Values that a scheduler changes at each step.
_COUNTED: Final = frozenset({"last_epoch", "last_step"})
# The schedulers within a scheduler.
_PARTS: Final = "_schedulers"
# Values of CyclicLR, which does not keep the two arguments that they derive from.
_DERIVED: Final = frozenset({"total_size", "step_ratio"})
_MOMENTA: Final = ("betas", "momentum")


def replaced(name: str, obj: Any, saved: Any) -> Iterator[str]:
    """Describe the settings of an object that differ in a saved state."""
    if isinstance(obj, torch.optim.Optimizer):
        yield from _of_groups(name, obj, saved)
    else:
        yield from _of_arguments(name, obj, saved)


def _of_groups(name: str, optimizer: torch.optim.Optimizer, saved: Any) -> Iterator[str]:
    if not optimizer_state.is_state(saved):
        return
    groups = list(zip(optimizer.param_groups, saved["param_groups"], strict=True))
    for place, (here, there) in enumerate(groups):
        group = f" of group {place}" if len(groups) > 1 else ""
        yield from _differ(name, here, there, here.keys() & there.keys() - _moved(there), group)


def _moved(group: Mapping[str, Any]) -> set[str]:
    """Return the values that a scheduler sets at each step."""
    return {"params", *(["lr"] if "initial_lr" in group else []), *(_MOMENTA if "max_momentum" in group else [])}


def _of_arguments(name: str, obj: Any, saved: Any) -> Iterator[str]:
    """Compare only the constructor arguments of the class, because other values may be the position
    in the schedule.
    """
    own = obj.state_dict()
    if not isinstance(saved, Mapping) or not isinstance(own, Mapping):
        return
    arguments = {one for kind in type(obj).__mro__ for one in inspect.signature(kind).parameters} - _COUNTED
    kept = {key for one in arguments for key in (one, f"_{one}", f"{one}s")} - {_PARTS} | _DERIVED
    yield from _differ(name, own, saved, own.keys() & saved.keys() & kept)
    parts = saved.get(_PARTS)
    if isinstance(parts, (list, tuple)):
        for place, (part, there) in enumerate(zip(getattr(obj, _PARTS), parts, strict=False)):
            yield from replaced(f"{name}[{place}]", part, there)


def _differ(
    name: str, here: Mapping[str, Any], there: Mapping[str, Any], keys: set[str], where: str = ""
) -> Iterator[str]:
    for key in sorted(keys):
        one, other = there[key], here[key]
        if not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor) and one != other:
            yield f"{name}: {key}{where} is {one!r} in the checkpoint and {other!r} in the script"
