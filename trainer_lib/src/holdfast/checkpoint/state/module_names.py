"""The names of a module's state, whatever it is wrapped in.

`torch.compile`, DistributedDataParallel, DataParallel and activation checkpointing put a module inside another one,
and their own word into every name below it. Such a word is left out of what is saved, so that a commit of a wrapped
module loads into a bare one and back. It is told by the type of the wrapper, never by the word: a module of the
script's own may well have a part that is called `module`.
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

    A file of another program may have the names of a compiled module: those are known too.
    """
    known = {saved: own for own, saved in saved_names(module, module.state_dict()).items()}
    plain = {name: name.replace(f"{_COMPILED}.", "") for name in state if name not in known}
    return {name: known.get(name) or known.get(plain[name], name) for name in state}


def common_prefixes(names: Collection[str]) -> list[str]:
    """The parts of paths with which all names begin, each with its dot: `a.`, `a.b.`."""
    first, last = min(names, default=""), max(names, default="")
    begin = os.path.commonprefix([first, last])  # noqa: RUF071  (these are no paths of files)
    return [begin[: place + 1] for place, letter in enumerate(begin) if letter == "."]


def state_names(module: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The name in a module's state of each of its parameters and buffers."""
    prefixes = {prefix: left for prefix, left in _wrapped(module) if prefix.endswith(f"{_RECOMPUTED}.")}
    longest = max(map(len, prefixes), default=0)
    return {name: _bare(name, prefixes, longest) for name in names}


def _wrapped(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Every prefix that ends in a wrapper's own word, and what is left of it without that word.

    Activation checkpointing takes its word out of the names of a state by itself, and leaves it in those of
    parameters, so prefixes inside of it are known with that word and without.
    """
    shown: dict[str, str] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        word = _word(part)
        if word is None:
            continue
        inside = f"{path}." if path else ""
        yield f"{inside}{word}.", inside
        outside = _bare(inside, shown, len(inside))
        if word == _RECOMPUTED:
            shown[f"{inside}{word}."] = inside
        elif outside != inside:
            yield f"{outside}{word}.", outside


def _word(part: torch.nn.Module) -> str | None:
    """The word that a wrapper puts before the names of what it wraps. Modules that are slow to import are not
    imported: where they are not loaded, nothing is wrapped by them."""
    if isinstance(part, _WRAPPERS):
        return "module"
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and isinstance(part, dynamo.OptimizedModule):
        return _COMPILED
    wrapper = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return _RECOMPUTED if wrapper is not None and isinstance(part, wrapper.ActivationWrapper) else None


def _bare(name: str, prefixes: Mapping[str, str], longest: int) -> str:
    """Without the wrappers' words, the innermost first: what stands before it keeps its length."""
    end = name.rfind(".", 0, longest)
    while end >= 0:
        prefix = name[: end + 1]
        if prefix in prefixes:
            name = prefixes[prefix] + name[end + 1 :]
        end = name.rfind(".", 0, end)
    return name
