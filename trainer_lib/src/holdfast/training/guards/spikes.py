"""Spikes: a loss or a gradient norm far above those of the last steps. Pure.

All inputs are agreed values or parts of the train state. All ranks therefore find the same spikes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from holdfast.core.json_fields import JsonFields
from holdfast.training.guards.settings import Guards, SpikeResponse

_DEVIATIONS: Final = 1.4826
"""The standard deviation of normal numbers, in median absolute deviations."""
_LEAST_SPREAD: Final = 1e-3
"""In parts of the median. With equal values, each difference would be a spike."""


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A value far above the last ones. `score` is its distance from their median, in standard deviations."""

    quantity: str
    value: float
    usual: float
    score: float
    response: SpikeResponse

    @property
    def skips(self) -> bool:
        """Whether the step is not applied."""
        return self.response in (SpikeResponse.SKIP, SpikeResponse.ROLL_BACK)

    def __str__(self) -> str:
        return (
            f"the {self.quantity} is {self.value:.4g}, and the median of the last steps is {self.usual:.4g} "
            f"({self.score:.1f} robust standard deviations)"
        )


@dataclass(frozen=True, kw_only=True)
class Recent(JsonFields):
    """The losses and gradient norms of the last steps with finite numbers, the oldest first."""

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()

    def with_step(self, guards: Guards, loss: float, norm: float) -> Recent:
        """Return the record with one more step, applied or not: a lasting change becomes the new usual."""
        if guards.watches_no_spikes:
            return self
        length = guards.spike_window
        return Recent(losses=(*self.losses, loss)[-length:], norms=(*self.norms, norm)[-length:])

    def spike(self, guards: Guards, loss: float, norm: float) -> Spike | None:
        """Return the spike of a step: the one with the stronger response, if both values are spikes."""
        quantities = (
            ("loss", loss, self.losses, guards.loss_spike),
            ("gradient norm", norm, self.norms, guards.gradient_spike),
        )
        found = [_spike(guards, *quantity) for quantity in quantities]
        return max(
            (one for one in found if one is not None),
            key=lambda one: (list(SpikeResponse).index(one.response), one.score),
            default=None,
        )


def _spike(
    guards: Guards, quantity: str, value: float, last: Sequence[float], response: SpikeResponse | str
) -> Spike | None:
    if response == SpikeResponse.IGNORE or 2 * len(last) < guards.spike_window:
        return None
    usual = median(last)
    spread = _DEVIATIONS * median(abs(one - usual) for one in last)
    spread = max(spread, _LEAST_SPREAD * abs(usual))
    above = value - usual
    if above <= guards.spike_score * spread:
        return None
    score = above / spread if spread else math.inf
    return Spike(quantity=quantity, value=value, usual=usual, score=score, response=SpikeResponse(response))
