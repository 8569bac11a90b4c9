"""The changes of a global step before its vote, which a discarded step reverts.

The optimizer has not run, so parameters are unchanged. But the forward pass has changed running statistics and other
buffers, and an AMP scaler may have inspected the gradients. The stepper seeds the random generators again.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

import torch

# Larger buffers are copied only if torch has counted a write to them. The count misses writes of some kernels, for
# example to the running statistics of batch normalisation. Smaller buffers are therefore always copied.
ALWAYS_COPIED_BYTES: Final = 1 << 20


@dataclass
class _Buffer:
    """A buffer, its version at the copy, and the copy."""

    tensor: torch.Tensor
    version: int | None
    copy: torch.Tensor


class Undo:
    """The state before a global step, which is restored if the step is discarded.

    Modules that are registered later, the script's own generators, and state in plain attributes are not covered.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], scaler: Any = None) -> None:
        parts = {id(part): part for module in modules for part in module.modules()}
        self._tables: list[dict[str, torch.Tensor | None]] = [part._buffers for part in parts.values()]
        self._scaler = scaler
        self._buffers: list[dict[str, _Buffer | None]] = [{} for _ in self._tables]
        self._remembered = False
        self._scaled: dict[str, Any] = {}

    def remember(self) -> None:
        """Store the state. Call it before each global step, and after each other change of the state."""
        with torch.no_grad():
            for table, known in zip(self._tables, self._buffers, strict=True):
                if table or known:
                    _look(table, known)
        self._remembered = True
        self._scaled = {} if self._scaler is None else _held(vars(self._scaler))

    def restore(self) -> None:
        """Restore the stored state, including buffers that were replaced, added or removed."""
        if not self._remembered:
            return
        self.restore_buffers()
        if self._scaler is not None:
            vars(self._scaler).update(_held(self._scaled))

    def restore_buffers(self) -> None:
        """Restore only the buffers: random generators and the scaler keep the state after the step."""
        for table, known in zip(self._tables, self._buffers, strict=True):
            if table or known:
                _put_back(table, known)


# Buffers


def _look(table: dict[str, torch.Tensor | None], known: dict[str, _Buffer | None]) -> None:
    for name in [name for name in known if name not in table]:
        del known[name]
    for name, tensor in table.items():
        known[name] = None if tensor is None else _copied(tensor, known.get(name))


def _copied(tensor: torch.Tensor, before: _Buffer | None) -> _Buffer:
    if before is None or before.tensor is not tensor or before.copy.shape != tensor.shape:
        return _Buffer(tensor=tensor, version=_version(tensor), copy=tensor.detach().clone())
    if _moved(before):
        before.copy.copy_(tensor)
        before.version = _version(tensor)
    return before


def _put_back(table: dict[str, torch.Tensor | None], known: dict[str, _Buffer | None]) -> None:
    for name in [name for name in table if name not in known]:
        del table[name]
    for name, kept in known.items():
        if kept is None:
            table[name] = None
            continue
        if _moved(kept):
            with torch.inference_mode() if kept.version is None else torch.no_grad():
                kept.tensor.copy_(kept.copy)
            kept.version = _version(kept.tensor)
        table[name] = kept.tensor


def _version(tensor: torch.Tensor) -> int | None:
    """Return torch's count of writes; an inference tensor has none."""
    return None if tensor.is_inference() else tensor._version


def _moved(kept: _Buffer) -> bool:
    version = _version(kept.tensor)
    return version is None or version != kept.version or kept.tensor.nbytes <= ALWAYS_COPIED_BYTES


# AMP


def _held(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return a scaler's attributes, with copies of those that it changes in place.

    Its `state_dict` would wait for the GPU.
    """
    return {name: _own(value) for name, value in attributes.items()}


def _own(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return deepcopy(value) if isinstance(value, dict) else value
