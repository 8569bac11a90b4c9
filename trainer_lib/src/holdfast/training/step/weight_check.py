"""The weights: the parameters that the optimizer trains, and whether they may be saved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from holdfast.checkpoint.state.dtensor import local
from holdfast.checkpoint.state.module_names import parameter_names

# Few enough that reading them after each step takes about 5 µs. Code that averages or swaps weights changes all of
# them.
_SAMPLED: Final = 8
_NUMBERS: Final = 4
# The tolerance for a number, in multiples of its last digit at the largest compared magnitude.
_LOST: Final = 4


class Weights:
    """The parameters of the managed optimizer that require a gradient; without an optimizer there are none.

    Torch counts the writes to a tensor, but not those through `.data`, and a swap that was undone is counted too. A
    few numbers are therefore compared instead. They are read after each step without waiting for the device.
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
        """Record the weights after a step."""
        self._kept = self._sample()

    def forget(self) -> None:
        """Discard the record: before the first step, the script may write any weights."""
        self._kept = None

    def changed(self) -> bool:
        """Return whether the script has changed the weights since the last step, without restoring them."""
        kept, now = self._kept, self._sample()
        return kept is not None and (len(kept) != len(now) or not all(map(_same, kept, now)))

    def among(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Return which tensors of a state are weights."""
        # the address of tensors without elements
        places = {local(one).data_ptr() for one in self._parameters()} - {0}
        return frozenset(name for name, tensor in tensors.items() if tensor.data_ptr() in places)

    def not_finite(self) -> str:
        """Return the name of a weight with a value that is not finite; "" if there is none. It reads all weights."""
        found = next((one for one in self._parameters() if not _is_finite(local(one).detach())), None)
        return "" if found is None else self._names.get(id(found), f"a parameter of shape {tuple(found.shape)}")

    def _parameters(self) -> list[torch.Tensor]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [one for group in groups for one in group["params"] if one.requires_grad]

    def _sample(self) -> list[torch.Tensor]:
        """Return the sampled numbers as one tensor for each dtype and device."""
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
    """Return some numbers from the middle of a tensor: the first ones may be padding, which never changes."""
    row = tensor.reshape(1) if tensor.dim() == 0 else tensor
    while row.dim() > 1:
        row = row[row.shape[0] // 2]
    return row[len(row) // 2 :][:_NUMBERS]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare within the loss of an optimizer that switches to another set of weights and back. NaN equals NaN."""
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
    )  # torch has no isfinite() for some one-byte dtypes
    return bool(wide.isfinite().all())
