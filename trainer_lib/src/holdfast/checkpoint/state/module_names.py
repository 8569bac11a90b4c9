"""The names in a module's state, independent of its wrappers.

`torch.compile`, DistributedDataParallel, DataParallel and activation checkpointing wrap a module and add their own
prefix to every name in it. Saved names omit this prefix, so that a checkpoint of a wrapped module loads into an
unwrapped one, and vice versa. The type of the wrapper identifies the prefix, never its text: a module of the script
may have a part that is named `module`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

import torch

_COMPILED: Final = "_orig_mod"
_RECOMPUTED: Final = "_checkpoint_wrapped_module"
_WRAPPERS: Final = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


def saved_names(module: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Map each of a module's own names to the name under which it is saved."""
    prefixes = dict(_wrapped(module))
    if not prefixes:
        return {name: name for name in names}
    longest = max(map(len, prefixes))
    return {name: _bare(name, prefixes, longest) for name in names}


def saved_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's state under its saved names."""
    state = module.state_dict()
    names = saved_names(module, state)
    return {names[own]: value for own, value in state.items()}


def parameter_names(objects: Mapping[str, Any]) -> dict[int, str]:
    """Return the names of all parameters of the modules, by the parameters' ids."""
    named: dict[int, str] = {}
    for name, module in sorted(objects.items()):
        if isinstance(module, torch.nn.Module):
            own = {path: id(one) for path, one in module.named_parameters()}
            saved = saved_names(module, own)
            named |= {number: f"{name}.{saved[path]}" for path, number in own.items() if number not in named}
    return named


def own_names(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """Map each name of a saved state to the module's own name. A name that the module does not have stays unchanged.

    A file of another program may have the names of a compiled module. They are mapped too.
    """
    known = {saved: own for own, saved in saved_names(module, module.state_dict()).items()}
    plain = {name: name.replace(f"{_COMPILED}.", "") for name in state if name not in known}
    return {name: known.get(name) or known.get(plain[name], name) for name in state}


def common_prefixes(names: Collection[str]) -> list[str]:
    """Return the path prefixes that all names share, each with its dot: `a.`, `a.b.`."""
    first, last = min(names, default=""), max(names, default="")
    begin = os.path.commonprefix([first, last])  # noqa: RUF071  (not file paths)
    return [begin[: place + 1] for place, letter in enumerate(begin) if letter == "."]


def state_names(module: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Map the names of a module's parameters and buffers to their names in its state."""
    prefixes = {prefix: left for prefix, left in _wrapped(module) if prefix.endswith(f"{_RECOMPUTED}.")}
    longest = max(map(len, prefixes), default=0)
    return {name: _bare(name, prefixes, longest) for name in names}


def _wrapped(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield every prefix that ends with a wrapper's own part, and the prefix without that part.

    Activation checkpointing removes its part from the names of a state by itself, but not from those of parameters.
    Prefixes inside it are therefore yielded in both forms.
    """
    shown: dict[str, str] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        part_name = _prefix_of(part)
        if part_name is None:
            continue
        inside = f"{path}." if path else ""
        yield f"{inside}{part_name}.", inside
        outside = _bare(inside, shown, len(inside))
        if part_name == _RECOMPUTED:
            shown[f"{inside}{part_name}."] = inside
        elif outside != inside:
            yield f"{outside}{part_name}.", outside


def _prefix_of(part: torch.nn.Module) -> str | None:
    """Return the prefix that a wrapper adds to the names in it.

    Modules that are slow to import are not imported: if they are not loaded, they wrap nothing.
    """
    if isinstance(part, _WRAPPERS):
        return "module"
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and isinstance(part, dynamo.OptimizedModule):
        return _COMPILED
    wrapper = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return _RECOMPUTED if wrapper is not None and isinstance(part, wrapper.ActivationWrapper) else None


def _bare(name: str, prefixes: Mapping[str, str], longest: int) -> str:
    """Remove the wrappers' parts from a name, the innermost first, so that the text before it keeps its length."""
    end = name.rfind(".", 0, longest)
    while end >= 0:
        prefix = name[: end + 1]
        if prefix in prefixes:
            name = prefixes[prefix] + name[end + 1 :]
        end = name.rfind(".", 0, end)
    return name
