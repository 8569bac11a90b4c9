"""The weights: the parameters that the optimizer trains, and whether they may go into a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from holdfast.checkpoint.state.dtensor import local
from holdfast.checkpoint.state.module_names import parameter_names

# Few enough that a look after each step takes some 5 µs; whoever averages or swaps weights changes all of them.
_SAMPLED: Final = 8
_NUMBERS: Final = 4
# Of a number's last digits, by the largest number that is compared with it.
_LOST: Final = 4


class Weights:
    """The parameters of the managed optimizer that require a gradient; without an optimizer there are none.

    Torch counts the writes to a tensor, but not those through `.data`, and a swap that was taken back has counted
    too. So a few numbers are compared, which are read after each step and not waited for.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        optimizer = objects.get("optimizer")
        self._optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self._names = parameter_names(objects)
        every = self._parameters()
        self._sampled = every[:: -(-len(every) // _SAMPLED)] if every else []
        self._places: list[int] = []
        self._views: list[list[torch.Tensor]] = []
        self._kept: list[torch.Tensor] | None = None

    def remember(self) -> None:
        """A step has left them as they are now."""
        self._kept = self._sample()

    def forget(self) -> None:
        """No step has been made: whatever the script writes is where training begins."""
        self._kept = None

    def changed(self) -> bool:
        """Whether the script has changed them since the last step, and not changed them back."""
        kept, now = self._kept, self._sample()
        return kept is not None and (len(kept) != len(now) or not all(map(_same, kept, now)))

    def among(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Which tensors of a state are weights."""
        places = {local(one).data_ptr() for one in self._parameters()} - {0}  # where those without elements are
        return frozenset(name for name, tensor in tensors.items() if tensor.data_ptr() in places)

    def not_finite(self) -> str:
        """The name of one that holds a value which is not finite; empty if none does. It reads all of them."""
        found = next((one for one in self._parameters() if not _is_finite(local(one).detach())), None)
        return "" if found is None else self._names.get(id(found), f"a parameter of shape {tuple(found.shape)}")

    def _parameters(self) -> list[torch.Tensor]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [one for group in groups for one in group["params"] if one.requires_grad]

    def _sample(self) -> list[torch.Tensor]:
        """One tensor for each dtype and device."""
        places = [local(one).data_ptr() for one in self._sampled]
        if places != self._places:
            self._places, self._views = places, _views([local(one).detach() for one in self._sampled])
        return [torch.cat(views) for views in self._views]


def _views(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    kinds = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            kinds[tensor.dtype, tensor.device].append(_middle(tensor))
    return list(kinds.values())


def _middle(tensor: torch.Tensor) -> torch.Tensor:
    """Some numbers of it: the first ones may be padding, which nothing changes."""
    row = tensor.reshape(1) if tensor.dim() == 0 else tensor
    while row.dim() > 1:
        row = row[row.shape[0] // 2]
    return row[len(row) // 2 :][:_NUMBERS]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Up to what is lost where an optimizer goes from one set of weights to another one and back; NaN is NaN."""
    if (one.dtype, one.device, one.shape) != (other.dtype, other.device, other.shape):
        return False
    if torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
        return True
    if one.dtype.itemsize == 1 or not (one.is_floating_point() or one.is_complex()):
        return False
    largest = max(float(each.abs().nan_to_num(posinf=0.0).max()) for each in (one, other))
    return torch.allclose(one, other, rtol=0.0, atol=_LOST * torch.finfo(one.dtype).eps * largest, equal_nan=True)


def _is_finite(tensor: torch.Tensor) -> bool:
    wide = (
        tensor.float() if tensor.dtype.itemsize == 1 else tensor
    )  # torch has no isfinite() for every type of a byte
    return bool(wide.isfinite().all())
