"""The names of a module's state, whatever it is wrapped in.

`torch.compile`, DistributedDataParallel, DataParallel and activation checkpointing put a module inside another one,
and their own word into every name below it. Such a word is left out of what is saved, so that a commit of a wrapped
module loads into a bare one and back. It is told by the type of the wrapper, never by the word: a module of the
script's own may well have a part that is called `module`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch

_COMPILED: Final = "_orig_mod"
_WRAPPERS: Final = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


def saved_names(module: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The name under which each of a module's own names is saved; the same for a module without wrappers."""
    prefixes = dict(_wrapped(module))
    if not prefixes:
        return {name: name for name in names}
    longest = max(map(len, prefixes))
    return {name: _bare(name, prefixes, longest) for name in names}


def saved_state(module: torch.nn.Module) -> dict[str, Any]:
    """A module's state under the names that it is saved with."""
    state = module.state_dict()
    names = saved_names(module, state)
    return {names[own]: value for own, value in state.items()}


def parameter_names(objects: Mapping[str, Any]) -> dict[int, str]:
    """The names of all parameters of the modules, by the parameters' ids."""
    named: dict[int, str] = {}
    for name, module in sorted(objects.items()):
        if isinstance(module, torch.nn.Module):
            own = {path: id(one) for path, one in module.named_parameters()}
            saved = saved_names(module, own)
            named |= {number: f"{name}.{saved[path]}" for path, number in own.items() if number not in named}
    return named


def own_names(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """The module's own name for each name of a saved state; one that it does not know stays as it is.

    First versions saved a compiled module under its wrapper's names: those are known too.
    """
    known = {saved: own for own, saved in saved_names(module, module.state_dict()).items()}
    plain = {name: name.replace(f"{_COMPILED}.", "") for name in state if name not in known}
    return {name: known.get(name) or known.get(plain[name], name) for name in state}


def _wrapped(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Every prefix that ends in a wrapper's own word, and what is left of it without that word."""
    for path, part in module.named_modules(remove_duplicate=False):
        word = _word(part)
        if word is not None:
            inside = f"{path}." if path else ""
            yield f"{inside}{word}.", inside


def _word(part: torch.nn.Module) -> str | None:
    if isinstance(part, _WRAPPERS):
        return "module"
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # slow to import, and without it nothing is compiled
    return _COMPILED if dynamo is not None and isinstance(part, dynamo.OptimizedModule) else None


def _bare(name: str, prefixes: Mapping[str, str], longest: int) -> str:
    """Without the wrappers' words, the innermost first: what stands before it keeps its length."""
    end = name.rfind(".", 0, longest)
    while end >= 0:
        prefix = name[: end + 1]
        if prefix in prefixes:
            name = prefixes[prefix] + name[end + 1 :]
        end = name.rfind(".", 0, end)
    return name
