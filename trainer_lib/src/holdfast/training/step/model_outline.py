"""The outline of a rank's model: names, shapes and dtypes of its parameters and buffers, and what is trained.

Gradients are averaged by their place in the order of parameters, so ranks with different outlines would average
different parameters. Values are not included: the state that continues replaces them on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import xxhash

from holdfast.checkpoint.state.module_names import parameter_names, saved_names

_NOTHING: Final = "nothing"


def outline(objects: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a line for each parameter and buffer of the managed modules and each parameter of the optimizer."""
    lines = []
    for name, thing in objects.items():
        if isinstance(thing, torch.nn.Module):
            lines += _module(name, thing)
    optimizer = objects.get("optimizer")
    if isinstance(optimizer, torch.optim.Optimizer):
        names = parameter_names(objects)
        lines += [
            f"{names.get(id(one)) or _kind(one)} in group {number} of the optimizer"
            for number, group in enumerate(optimizer.param_groups)
            for one in group["params"]
        ]
    return tuple(lines)


def digest(lines: Sequence[str]) -> str:
    """Return the digest of an outline, by which ranks compare theirs."""
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


def difference(outlines: Sequence[Sequence[str]], reference: int) -> str:
    """Return the first difference between a rank's outline and that of rank `reference`; "" if all are equal."""
    expected = outlines[reference]
    for rank, lines in enumerate(outlines):
        for place in range(max(len(lines), len(expected))):
            theirs, own = _at(expected, place), _at(lines, place)
            if theirs != own:
                return (
                    f"the ranks have different models: rank {reference} has {theirs}, where rank {rank} has {own}. "
                    "Build the same model and optimizer in the same order on every rank: the same version of the "
                    "script, nothing that depends on the rank or on the order of a set"
                )
    return ""


def _module(name: str, module: torch.nn.Module) -> list[str]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    saved = saved_names(module, tensors)
    return [f"{name}.{saved[path]} ({_kind(tensor)})" for path, tensor in tensors.items()]


def _kind(tensor: torch.Tensor) -> str:
    kind = f"shape {tuple(tensor.shape)}, {tensor.dtype}"
    if not isinstance(tensor, torch.nn.Parameter):
        return f"buffer, {kind}"
    return kind if tensor.requires_grad else f"{kind}, frozen"


def _at(lines: Sequence[str], place: int) -> str:
    return lines[place] if place < len(lines) else _NOTHING
