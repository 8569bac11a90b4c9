"""Makes numbers of this rank not finite (its loss, a gradient or a weight), flips a bit of a weight, or raises the
error of a full GPU memory.

This module has no torch: it only calls methods of the tensors that it gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from holdfast.fault_injection.plan import Kind

_NAN = float("nan")


class Numbers:
    """The numbers of this rank. A fault of the loss or of a gradient holds for some successive steps."""

    def __init__(self) -> None:
        self._weights: Callable[[], Iterable[Any]] = tuple
        self._left = {Kind.NAN_LOSS: 0, Kind.NAN_GRADIENT: 0}
        self._step = -1
        self._out_of_memory: type[Exception] = MemoryError
        self._full = 0

    def manage(self, weights: Callable[[], Iterable[Any]], out_of_memory: type[Exception]) -> None:
        """Set the weights of the rank, of which the first one that requires a gradient gets the faults.

        `out_of_memory` is the error of torch.
        """
        self._weights, self._out_of_memory = weights, out_of_memory

    def begin(self, step: int) -> None:
        """Begin a micro-batch of the step after `step`. A repeated step has another number before it."""
        if step != self._step:
            self._step = step
            self._left = {kind: max(0, left - 1) for kind, left in self._left.items()}

    def inject(self, kind: Kind, steps: int) -> None:
        """Begin a fault in the present step."""
        weight = next((one for one in self._weights() if one.requires_grad), None)
        if kind is Kind.NAN_WEIGHT and weight is not None:
            weight.data.fill_(_NAN)
        elif kind is Kind.FLIP_WEIGHT and weight is not None:
            own = weight.to_local() if hasattr(weight, "to_local") else weight
            own.data[(0,) * own.dim()].neg_()  # flips the sign bit
        elif kind is Kind.OOM:
            self._full = steps
        elif kind in self._left:
            if kind is Kind.NAN_GRADIENT and weight is not None and not self._left[kind]:
                weight.register_hook(self._gradient)
            self._left[kind] = steps

    def loss(self, loss: Any) -> Any:
        """Return the loss of a micro-batch, which is NaN during a fault. Raise an error if the memory is full.

        A step that is repeated because of this error counts once more.
        """
        if self._full:
            self._full -= 1
            raise self._out_of_memory("holdfast chaos: the memory of the GPU is full")
        return loss * _NAN if self._left[Kind.NAN_LOSS] else loss

    def _gradient(self, gradient: Any) -> Any:
        return gradient * _NAN if self._left[Kind.NAN_GRADIENT] else gradient
