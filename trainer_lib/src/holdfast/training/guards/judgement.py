"""The decision whether a prepared step is applied. Pure.

All inputs are agreed values or parts of the train state. All ranks therefore decide alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.training.guards.settings import Guards
from holdfast.training.guards.spikes import Recent, Spike
from holdfast.training.protocol.step_ballot import Agreed


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """`reason` is that of the `StepResult`, and `counts` says whether the guards respond to the step."""

    reason: str
    applied: bool = False
    counts: bool = False
    spike: Spike | None = None

    @property
    def empty(self) -> bool:
        """Whether no rank could read any of its samples."""
        return self.reason == "Unreadable"


def judge(guards: Guards, recent: Recent, agreed: Agreed, norm: float, *, scale: float | None) -> Judgement:
    """Return the judgement on a step with this gradient norm before clipping.

    `scale` is that of the AMP scaler. It may have caused an overflow if it is above 1, and then decreases.
    """
    if agreed.weight == 0:
        return Judgement(reason="Unreadable")
    if agreed.non_finite or not math.isfinite(norm):
        overflow = not agreed.non_finite and scale is not None and scale > 1.0
        return Judgement(reason="NonFinite", counts=not overflow)
    spike = recent.spike(guards, agreed.loss, norm)
    if spike is not None and spike.skips:
        return Judgement(reason="Spike", counts=True, spike=spike)
    return Judgement(reason="Committed", applied=True, spike=spike)
