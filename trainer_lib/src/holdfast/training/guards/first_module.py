"""The first module whose output is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


class FirstModule:
    """Watches the modules of a job with forward hooks, from `arm` to `disarm`.

    Compiled modules are not watched: a hook would compile them again.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        modules = {name: thing for name, thing in objects.items() if isinstance(thing, torch.nn.Module)}
        self._parts = [] if any(map(_is_compiled, modules.values())) else _parts(modules)
        self._hooks: list[Any] = []
        self.name = ""
        """The first module found since `arm`; "" if there is none."""

    @property
    def armed(self) -> bool:
        return bool(self._hooks)

    def arm(self) -> None:
        """Watch the next forward passes."""
        self.name = ""
        for name, part in self._parts:
            self._hooks.append(part.register_forward_hook(self._hook(name)))

    def disarm(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook(self, name: str) -> Any:
        def look(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if not self.name and not all(map(_is_finite, _tensors(output))):
                self.name = f"{name} ({type(module).__name__})"

        return look


def _parts(modules: Mapping[str, torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    return [part for name, module in modules.items() for part in module.named_modules(prefix=name)]


def _is_compiled(module: torch.nn.Module) -> bool:
    parts = list(module.modules())
    return any(type(one).__name__ == "OptimizedModule" or one._compiled_call_impl is not None for one in parts)


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _is_finite(tensor: torch.Tensor) -> bool:
    floating = tensor.is_floating_point() or tensor.is_complex()
    return not floating or tensor.dtype.itemsize == 1 or bool(tensor.detach().isfinite().all())
