"""The time of a step that a rank uses itself. Pure.

All ranks of a world end a step together, so their steps take equally long. A slow rank is the one that waits least
for the others: its own time, for data and for computation, is longer than theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Final

from holdfast.telemetry.activity import Activity

_REMEMBERED: Final = 16
KNOWN_STEPS: Final = 8
_PARTS: Final = (
    (Activity.DATA,),
    (Activity.COMPUTE, Activity.APPLY),
    (Activity.AVERAGE, Activity.VOTE),
)


@dataclass(frozen=True, kw_only=True)
class StepPace:
    """A rank's seconds per step, as medians over its last steps in this world. All values are 0 until they are known.

    `data` is the time until the script has its batches, `compute` that of computation and optimizer. `weight` is the
    rank's share of the global batch. Checkpoints and evaluations do not count.
    """

    data: float = 0.0
    compute: float = 0.0
    waiting: float = 0.0
    weight: float = 0.0

    @property
    def own(self) -> float:
        return self.data + self.compute

    @property
    def known(self) -> bool:
        """Whether the rank has made enough steps, and had a part of the batches."""
        return self.own > 0 and self.weight > 0


class PaceWindow:
    """The last steps of one rank. `seconds` returns the total time of an activity."""

    def __init__(self, seconds: Callable[[Activity], float]) -> None:
        self._seconds = seconds
        self._before = self._totals()
        self._steps: deque[tuple[float, ...]] = deque(maxlen=_REMEMBERED)

    def add(self, weight: float) -> StepPace:
        """Add the time since the last call as one step, and return the pace."""
        before, self._before = self._before, self._totals()
        self._steps.append((*(now - then for now, then in zip(self._before, before, strict=True)), weight))
        if len(self._steps) < KNOWN_STEPS:
            return StepPace()
        data, compute, waiting, share = map(median, zip(*self._steps, strict=True))
        return StepPace(data=data, compute=compute, waiting=waiting, weight=share)

    def _totals(self) -> tuple[float, ...]:
        return tuple(sum(map(self._seconds, part)) for part in _PARTS)
