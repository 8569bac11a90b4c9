"""The names, dtypes and settings in an optimizer's state.

The state identifies parameters by their position. The parameters' names are therefore saved with it. Otherwise an
optimizer with other parameters, or in another order, would silently load the wrong moments. In addition, torch casts
what it loads to the parameter's dtype, which rounds the fp32 masters and moments of bf16 weights. Here, each tensor
keeps its saved dtype.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from holdfast.checkpoint.state import rng

_log = logging.getLogger("holdfast.checkpoint")

NAMES: Final = "names"
KIND: Final = "kind"
_ROWS: Final = 2  # length of a rehearsal's parameter along each dimension, at most


def labelled(optimizer: torch.optim.Optimizer, state: Any, named: Mapping[int, str]) -> Any:
    """Return the state with the kind of optimizer, and with the name of each parameter that a managed module has.

    The names are grouped like the parameters.
    """
    if not isinstance(state, dict) or NAMES in state or KIND in state:
        return state
    return {**state, NAMES: names_in(optimizer, named), KIND: kind(optimizer)}


def kind(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the torch optimizer that it is or derives from; None for any other, whose name does not identify its
    state.
    """
    every = [one.__name__ for one in type(optimizer).__mro__ if one.__module__.startswith("torch.optim.")]
    return every[0] if every[0] != torch.optim.Optimizer.__name__ else None


def is_state(saved: Any) -> bool:
    """Return whether the value has the form of a torch optimizer's state."""
    groups = saved.get("param_groups") if isinstance(saved, dict) and isinstance(saved.get("state"), dict) else None
    return isinstance(groups, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(isinstance(number, (int, str)) for number in group["params"])
        for group in groups
    )


def names_in(optimizer: torch.optim.Optimizer, named: Mapping[int, str]) -> list[list[str | None]]:
    """Return the names of the optimizer's parameters, group by group; None for a parameter of no module."""
    return [[named.get(id(one)) for one in group["params"]] for group in optimizer.param_groups]


def load(optimizer: torch.optim.Optimizer, state: Any, placed: Callable[[Any, torch.Tensor], Any]) -> None:
    """Load the optimizer's state. Each tensor keeps its saved dtype, and `placed` adapts it to its parameter."""
    own = (
        {key: value for key, value in state.items() if key not in (NAMES, KIND)} if isinstance(state, dict) else state
    )
    for parameter, saved in _entries(optimizer, own):
        saved |= {key: placed(value, parameter) for key, value in saved.items()}
    optimizer.load_state_dict(own)
    for parameter, saved in _entries(optimizer, own):
        loaded = optimizer.state.get(parameter, {})
        for key in loaded.keys() & saved.keys():
            loaded[key] = _exact(saved[key], loaded[key])


def _entries(optimizer: torch.optim.Optimizer, state: Any) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """Yield each parameter with its saved entry; nothing for a class with its own form of state."""
    if not (isinstance(state, dict) and {"param_groups", "state"} <= state.keys()):
        return
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            entry = state["state"].get(number)
            if isinstance(entry, dict):
                yield parameter, entry


def _exact(saved: Any, loaded: Any) -> Any:
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if saved.dtype == loaded.dtype else saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {key: _exact(saved[key], value) if key in saved else value for key, value in loaded.items()}
    if isinstance(saved, (list, tuple)) and type(saved) is type(loaded) and len(saved) == len(loaded):
        return type(loaded)(map(_exact, saved, loaded))
    return loaded


def rehearse(optimizer: torch.optim.Optimizer) -> Any:
    """Return the state that the first step would create; None if it cannot be determined.

    The step runs on a copy with tiny parameters, which has only the optimizer's groups and defaults. Hooks and
    schedulers are not called.
    """
    if getattr(optimizer, "state", None):
        return None  # it has stepped, so its state exists
    before = rng.States.current()
    try:
        copied = _understudy(optimizer)
        with torch.enable_grad():
            type(optimizer).step(copied)
        return copied.state_dict()
    except Exception as error:  # noqa: BLE001  (the script's own code may raise anything here)
        _log.debug("the first step of %s cannot be rehearsed: %s", type(optimizer).__name__, error)
        return None
    finally:
        before.apply()


def foreseen(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.dtype, tuple[int, ...]]]:
    """Yield dtype and shape of each tensor of a parameter's size that the first step will create,
    if this is known.
    """
    for parameter, made in _entries(optimizer, rehearse(optimizer)):
        for value in made.values():
            if isinstance(value, torch.Tensor) and value.shape == _tiny(parameter).shape:
                yield value.dtype, tuple(parameter.shape)


def unset(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> list[str]:
    """Return the settings that a saved group lacks, except those that the optimizer adds for older releases."""
    wanted = getattr(optimizer, "defaults", {}).keys()
    if not _keeps_state(optimizer) or all(wanted <= group.keys() for group in groups):
        return []
    try:
        copied = _understudy(optimizer, {id(optimizer.state): defaultdict(dict)})
        copied.load_state_dict({"state": {}, "param_groups": groups})
    except Exception as error:  # noqa: BLE001  (as above)
        _log.debug("whether %s accepts the saved groups cannot be determined: %s", type(optimizer).__name__, error)
        return []
    return sorted({key for group in copied.param_groups for key in wanted - group.keys()})


def misshaped(optimizer: torch.optim.Optimizer, state: Any) -> list[tuple[Any, str, torch.Tensor]]:
    """Return the saved tensors that lack their parameter's shape, although the optimizer's own tensors have it.

    Each one comes with its parameter and its key.
    """
    if not _keeps_state(optimizer):
        return []
    doubtful = [
        (parameter, key, value)
        for parameter, saved in _entries(optimizer, state)
        for key, value in saved.items()
        if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape
    ]
    own = _in_shape(optimizer) if doubtful else set()
    return [(parameter, key, value) for parameter, key, value in doubtful if (id(parameter), key) in own]


def _keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer loads a state without any hook or override that changes it."""
    hooked = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None)
    return type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict and not hooked


def _in_shape(optimizer: torch.optim.Optimizer) -> set[tuple[int, str]]:
    """Return which existing or future tensors have their parameter's shape, by parameter ID and key."""
    made: Iterator[tuple[Any, torch.Size, Mapping[Any, Any]]]
    if getattr(optimizer, "state", None):
        made = ((one, one.shape, state) for one, state in optimizer.state.items() if isinstance(one, torch.Tensor))
    else:
        made = ((one, _tiny(one).shape, state) for one, state in _entries(optimizer, rehearse(optimizer)))
    return {
        (id(parameter), key)
        for parameter, shape, state in made
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.shape == shape
    }


def _understudy(optimizer: torch.optim.Optimizer, memo: Mapping[int, Any] | None = None) -> torch.optim.Optimizer:
    tiny: dict[int, Any] = dict(memo or {})
    for group in optimizer.param_groups:
        tiny |= {id(one): _tiny(one) for one in group["params"]}
    return copy.deepcopy(optimizer, tiny)


def _tiny(parameter: torch.Tensor) -> torch.nn.Parameter:
    shape = [min(length, _ROWS) for length in parameter.shape]
    made = torch.nn.Parameter(
        torch.zeros(shape, dtype=parameter.dtype, device="cpu"), requires_grad=parameter.requires_grad
    )
    if made.requires_grad:
        made.grad = torch.zeros_like(made)
    return made
