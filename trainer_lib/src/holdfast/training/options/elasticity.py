"""The effect of the world size on the global batch and on the learning rate. No collectives, no clock.

By default there is no effect: the global batch stays, its shares are weighted exactly, and the learning rate stays
correct. A scaled batch keeps each rank's share instead, and the learning rate may then follow by a rule.

The rule's factor applies only during the optimizer's step. Everything else that reads or writes `param_groups`
(schedulers, also ReduceLROnPlateau, checkpoints, the script) therefore sees values that do not depend on the world
size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from holdfast.core.errors import UsageError
from holdfast.training.options.validation import check_whole

ParamGroup = dict[str, Any]


class Batch(StrEnum):
    """What stays the same when the world size changes."""

    CONSTANT = "constant"  # the global batch
    SCALED = "scaled"  # each rank's share of the global batch


class Rule(StrEnum):
    """How the learning rate follows the global batch."""

    NONE = "none"
    LINEAR = "linear"
    SQUARE_ROOT = "square-root"

    def factor(self, ratio: float) -> float:
        """Return the factor for a global batch of `ratio` times the reference."""
        match self:
            case Rule.NONE:
                return 1.0
            case Rule.LINEAR:
                return ratio
            case Rule.SQUARE_ROOT:
                return math.sqrt(ratio)


@dataclass(frozen=True, kw_only=True)
class Elasticity:
    """How training follows the world size.

    `global_batch_size` and the optimizer's learning rate apply to `reference_world_size` ranks. A learning rate rises
    over `warmup_steps` steps. It falls immediately, because the batch is already smaller.
    """

    batch: str = Batch.CONSTANT
    learning_rate: str = Rule.NONE
    reference_world_size: int | None = None
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _one_of("batch", self.batch, Batch)
        _one_of("learning_rate", self.learning_rate, Rule)
        check_whole("warmup_steps", self.warmup_steps, least=0)
        if self.reference_world_size is not None:
            check_whole("reference_world_size", self.reference_world_size, least=1)
        if self.batch == Batch.SCALED and self.reference_world_size is None:
            raise UsageError(
                "batch is 'scaled' and reference_world_size is missing: "
                "set the number of ranks that global_batch_size and the learning rate are for"
            )
        if self.batch == Batch.CONSTANT and self.learning_rate != Rule.NONE:
            raise UsageError(
                f"learning_rate is {str(self.learning_rate)!r} needs a global batch that changes, but "
                "batch is constant: set batch='scaled' or learning_rate='none'"
            )
        if self.learning_rate == Rule.NONE and self.warmup_steps:
            raise UsageError(
                f"warmup_steps is {self.warmup_steps}, but learning_rate 'none' never rises: "
                "set learning_rate='linear' or 'square-root', or leave warmup_steps out"
            )

    def factor(self, world_size: int) -> float:
        """Return the factor of the learning rate in a world of this size."""
        if self.batch == Batch.CONSTANT or self.reference_world_size is None:
            return 1.0
        return Rule(self.learning_rate).factor(world_size / self.reference_world_size)


def global_batch(config: Elasticity, requested: int, world_size: int) -> int:
    """Return the samples of one step in a world of this size. `requested` is the script's request."""
    if config.batch == Batch.CONSTANT or config.reference_world_size is None:
        return requested
    share, rest = divmod(requested, config.reference_world_size)
    if rest or not share:
        raise UsageError(
            f"global_batch_size {requested} is not a multiple of reference_world_size {config.reference_world_size}: "
            "a scaled batch needs shares of the same size, so change one of them"
        )
    return share * world_size


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """The learning rate's factor, which moves from `begin` to `target`, starting at the step `since`."""

    begin: float
    target: float
    since: int

    def at(self, step: int, length: int) -> float:
        """Return the factor for this step. The last of `length` steps is the first one at the target."""
        made = max(0, step - self.since) + 1
        if made >= length or self.target <= self.begin:
            return self.target
        return self.begin + (self.target - self.begin) * made / length

    def towards(self, target: float, step: int, length: int) -> Ramp:
        """Return the ramp for a world that executes this step and requests `target`."""
        if target == self.target:
            return self
        return Ramp(begin=self.at(step - 1, length), target=target, since=step)

    def to_json(self) -> dict[str, Any]:
        """Return the form for checkpoints and new ranks."""
        return {"begin": self.begin, "target": self.target, "since": self.since}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Ramp:
        return cls(begin=float(value["begin"]), target=float(value["target"]), since=int(value["since"]))

    @classmethod
    def from_optional(cls, value: Mapping[str, Any] | None) -> Ramp | None:
        """Parse an optional ramp."""
        return None if value is None else cls.from_json(value)


class Scaler:
    """Applies the rule to an optimizer. `ramp` is its complete state, for checkpoints and new ranks.

    The state changes only with applied steps, so it is the same on every rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, config: Elasticity) -> None:
        self.config = config
        self.ramp: Ramp | None = None
        self._optimizer = optimizer
        self._applied: float | torch.Tensor | None = None
        if config.learning_rate != Rule.NONE:
            _check_rates(self._groups())

    @contextmanager
    def applied(self, world_size: int, step: int, extra: float = 1.0) -> Iterator[None]:
        """Apply the learning rate of the world that averaged the gradients of `step`, during the optimizer's step.

        `extra` is a further factor.
        """
        target, length = self.config.factor(world_size), self.config.warmup_steps
        before = self.ramp or Ramp(begin=target, target=target, since=step)
        self.ramp = before.towards(target, step, length)
        factor = self.ramp.at(step, length) * extra
        with scaled(self._groups(), factor) if factor != 1.0 else nullcontext():
            self._applied = self._first()
            yield

    @property
    def lr(self) -> float | None:
        """The learning rate of the first group in the last step, or the script's value before any step.

        For the log.
        """
        rate = self._first() if self._applied is None else self._applied
        return None if rate is None else float(rate)

    def to_json(self) -> dict[str, Any] | None:
        """Return the state for checkpoints and new ranks."""
        return None if self.ramp is None else self.ramp.to_json()

    def _first(self) -> float | torch.Tensor | None:
        groups = self._groups()
        rate = groups[0].get("lr") if groups else None
        return rate.detach().clone() if isinstance(rate, torch.Tensor) else rate

    def _groups(self) -> list[ParamGroup]:
        return [] if self._optimizer is None else self._optimizer.param_groups


@contextmanager
def scaled(groups: Sequence[ParamGroup], factor: float) -> Iterator[None]:
    """Multiply the groups' learning rates, and restore them exactly afterwards.

    A tensor changes in place, because compiled and captured steps read this tensor, and groups may share it. If an
    optimizer changes a rate in its step, the new rate is scaled, and is divided by the factor afterwards.
    """
    numbers = [(group, group["lr"]) for group in groups if not isinstance(group["lr"], torch.Tensor)]
    tensors = {id(group["lr"]): group["lr"] for group in groups if isinstance(group["lr"], torch.Tensor)}
    copies = {key: rate.detach().clone() for key, rate in tensors.items()}
    with torch.no_grad():
        for rate in tensors.values():
            rate.mul_(factor)
    for group, rate in numbers:
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in numbers:
            group["lr"] = rate if group["lr"] == rate * factor else group["lr"] / factor
        with torch.no_grad():
            for key, rate in tensors.items():
                rate.copy_(copies[key])


def _check_rates(groups: Sequence[ParamGroup]) -> None:
    for number, group in enumerate(groups):
        if not isinstance(group.get("lr"), (int, float, torch.Tensor)):
            raise UsageError(
                f"group {number} of the optimizer has no numeric lr, so no rule can scale it: "
                "set its lr, or set learning_rate='none'"
            )


def _one_of(field: str, value: Any, known: type[StrEnum]) -> None:
    if value not in list(known):
        names = " or ".join(repr(str(one)) for one in known)
        raise UsageError(f"{field} is {value!r}: expected {names}")
