"""The state that a rank takes from world to world: objects, counters, position in the data, and rank state.

It is the same on every rank, except for the rank state (until a world has formed) and the random generators.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from holdfast.checkpoint.policy.interval import Failures
from holdfast.checkpoint.restore.rank_reader import Loaded
from holdfast.checkpoint.saving.checkpoint_index import History, metrics, told
from holdfast.checkpoint.state import rng
from holdfast.checkpoint.state.dtypes import blank
from holdfast.checkpoint.state.flatten import Flat, Stateful, flatten
from holdfast.checkpoint.state.load import load_into, tell
from holdfast.checkpoint.state.numerics import fingerprint as numerics
from holdfast.checkpoint.state.optimizer_state import foreseen
from holdfast.checkpoint.state.unflatten import adopt, all_of_it
from holdfast.core.attempt import AttemptId, Json
from holdfast.core.errors import StateError, UsageError
from holdfast.core.hashing import mix_all
from holdfast.training.data import Position
from holdfast.training.distributed.fsdp import Sharding
from holdfast.training.options.elasticity import Elasticity, Ramp, Scaler
from holdfast.training.protocol import step_commit
from holdfast.training.protocol.step_commit import RankState

_log = logging.getLogger("holdfast.job")
# The number of steps whose metrics a checkpoint has.
MOST_MEASURED: Final = 256


class TrainState:
    """The state of the job on this rank."""

    def __init__(self, objects: Mapping[str, Stateful]) -> None:
        self.objects = dict(objects)
        self.rank_state = RankState()
        self.origin: AttemptId | None = None  # the last attempt that voted in this state
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.position: Position | None = None
        self.rates = Scaler(None, Elasticity())
        self.sharding: Sharding | None = None
        self.saved_step = 0  # the last step known to be durable
        self.metrics: History = {}  # the script's metrics by step
        self.failures = Failures()
        self.claimed: int | None = None  # the generation whose claim is known to be durable

    @property
    def step(self) -> int:
        """The last completed step."""
        return self.rank_state.step

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The managed optimizer, if there is one."""
        found = self.objects.get("optimizer")
        return found if isinstance(found, torch.optim.Optimizer) else None

    def modules(self) -> list[torch.nn.Module]:
        return [thing for thing in self.objects.values() if isinstance(thing, torch.nn.Module)]

    def trained(self) -> Iterator[torch.nn.Parameter]:
        """Yield every parameter of the modules and of the optimizer."""
        for module in self.modules():
            yield from module.parameters()
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                yield from group["params"]

    def flat(self) -> Flat:
        """Return the flattened state of all objects."""
        return flatten(self.objects)

    def foreseen(self) -> Iterator[tuple[torch.dtype, tuple[int, ...]]]:
        """Yield dtypes and shapes of the tensors that the state of these objects has after a step."""
        for tensor in self.flat().tensors.values():
            yield tensor.dtype, tuple(tensor.shape)
        for thing in self.objects.values():
            if isinstance(thing, torch.optim.Optimizer):
                yield from foreseen(thing)

    def measured(self, values: Mapping[str, float]) -> None:
        """Record the script's metrics of the current state. Only the newest are kept."""
        for name, value in values.items():
            if not isinstance(value, (int, float)) or not finite(value):
                raise UsageError(f"metric {name!r} is {value!r}: expected a finite number, such as loss.item()")
        if not values:
            return
        self.metrics[self.step] = self.metrics.get(self.step, {}) | {name: float(v) for name, v in values.items()}
        self.metrics = dict(sorted(self.metrics.items())[-MOST_MEASURED:])

    # For newcomers, from memory

    def side(self) -> dict[str, Any]:
        """Return the state that is sent in addition to the objects."""
        return {
            "step": self.step,
            "origin": None if self.origin is None else self.origin.to_json(),
            "skipped": self.skipped,
            "skippedInARow": self.skipped_in_a_row,
            "savedStep": self.saved_step,
            "metrics": told(self.metrics),
            "failures": self.failures.to_json(),
            "ramp": self.rates.to_json(),
            "position": None if self.position is None else self.position.to_json(),
        }

    def load_from_peer(self, tree: Any, tensors: Mapping[str, torch.Tensor], side: Json, *, rank: int) -> None:
        """Load the state that a survivor sent."""
        self._load(tree, lambda name: tensors[name], lambda name: torch.empty_like(tensors[name], device="meta"))
        self.origin = AttemptId.from_optional(side["origin"])
        self.skipped, self.skipped_in_a_row = int(side["skipped"]), int(side["skippedInARow"])
        self.saved_step = int(side["savedStep"])
        self.metrics = metrics(side)
        self.failures = Failures.from_optional(side.get("failures"))
        self.rates.ramp = Ramp.from_optional(side["ramp"])
        self.position = None if side["position"] is None else Position.from_json(side["position"])
        rng.seed(mix_all(int(side["step"]), rank))

    # From a checkpoint

    def load_checkpoint(self, loaded: Loaded, *, rank: int) -> None:
        """Load the state of a checkpoint."""
        manifest = loaded.manifest
        side = _Side.read(manifest.state, manifest.data, loaded.alone)  # before anything is changed
        other = self._load(
            manifest.objects,
            lambda name: adopt(manifest.tensors[name], loaded.tensors[name]),
            lambda name: blank(manifest.tensors[name]),
        )
        if rank == 0:
            tell(other)
        self.rank_state = RankState(step=manifest.step)
        self.origin = manifest.attempt_id
        self.skipped, self.rates.ramp, self.position = side.skipped, side.ramp, side.position
        self.metrics = metrics(manifest.state)
        self.failures = Failures.from_optional(manifest.state.get("failures"))
        self.skipped_in_a_row = 0
        self.saved_step = manifest.step
        if side.generators is None:
            rng.seed(mix_all(manifest.step, rank))  # this rank did not exist when the checkpoint was made
        else:
            side.generators.apply()
        if manifest.numerics != numerics():
            _log.warning(
                "the checkpoint was written with other numeric settings; results may differ in their last bits"
            )

    def start_over(self) -> None:
        """Start from the beginning: the objects stay as the script created them."""
        self.rank_state, self.origin, self.position, self.rates.ramp = RankState(), None, None, None
        self.saved_step = 0
        self.metrics = {}

    def _load(
        self, tree: Any, tensor: Callable[[str], torch.Tensor], blank: Callable[[str], torch.Tensor]
    ) -> list[str]:
        rows = all_of_it if self.sharding is None else self.sharding.part
        return load_into(self.objects, tree, tensor, rows, blank=blank)

    # One step

    def stepped(self, attempt_id: AttemptId) -> None:
        """Record that the vote on the next step returned, which completes it on this rank."""
        self.rank_state = step_commit.committed(self.rank_state)
        self.origin = attempt_id


@dataclass(frozen=True, kw_only=True)
class _Side:
    """The part of a checkpoint's state outside the objects."""

    skipped: int
    ramp: Ramp | None
    position: Position | None
    generators: rng.States | None

    @classmethod
    def read(cls, state: Any, data: Any, alone: Any) -> _Side:
        """Parse the state. Raise `StateError` if it is not a job's state."""
        try:
            return cls(
                skipped=int(state.get("counters", {}).get("skipped", 0)),
                ramp=Ramp.from_optional(state.get("ramp")),
                position=None if data is None else Position.from_json(data),
                generators=None if alone is None else rng.read(rng.of(alone)),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise StateError(
                f"the checkpoint's counters or data position are not valid ({error!r}): use an older checkpoint"
            ) from error


def finite(*numbers: float) -> bool:
    return all(math.isfinite(number) for number in numbers)
