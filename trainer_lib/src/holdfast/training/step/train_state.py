"""The state that a rank takes from world to world: objects, counters, position in the data, and rank state.

It is the same on every rank, except for the rank state (until a world has formed).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from holdfast.checkpoint.policy.interval import Failures
from holdfast.checkpoint.restore.rank_reader import Loaded
from holdfast.checkpoint.saving.checkpoint_index import History, metrics, told
from holdfast.checkpoint.state import rng
from holdfast.checkpoint.state.dtypes import on_meta
from holdfast.checkpoint.state.flatten import Flat, Stateful, flatten
from holdfast.checkpoint.state.load import load_into, log_replaced_settings
from holdfast.checkpoint.state.numerics import changes
from holdfast.checkpoint.state.numerics import fingerprint as numerics
from holdfast.checkpoint.state.optimizer_state import foreseen
from holdfast.checkpoint.state.unflatten import adopt, all_of_it
from holdfast.core.attempt import AttemptId, Json
from holdfast.core.errors import StateError, UsageError
from holdfast.training.data import BadSamples, Position
from holdfast.training.distributed.fsdp import Sharding
from holdfast.training.guards.non_finite import NonFiniteSteps, RollBack
from holdfast.training.guards.out_of_memory import OutOfMemory, latest
from holdfast.training.guards.spikes import Recent
from holdfast.training.options.elasticity import Elasticity, Ramp, Scaler
from holdfast.training.protocol import step_commit
from holdfast.training.protocol.random_streams import Streams
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
        self.non_finite = NonFiniteSteps()
        self.recent = Recent()
        self.bad_samples = BadSamples()
        self.out_of_memory = OutOfMemory()
        self.roll_back: RollBack | None = None  # until the first vote after it
        self.position: Position | None = None
        self.rates = Scaler(None, Elasticity())
        self.sharding: Sharding | None = None
        self.saved_step = 0  # the last step known to be durable
        self.metrics: History = {}  # the script's metrics by step
        self.failures = Failures()
        self.streams = Streams(ranks=())
        self.diverged = False  # whether the replicas differ and no state has a majority
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
            "nonFinite": self.non_finite.to_json(),
            "recent": self.recent.to_json(),
            "badSamples": self.bad_samples.to_json(),
            "savedStep": self.saved_step,
            "metrics": told(self.metrics),
            "failures": self.failures.to_json(),
            "ramp": self.rates.to_json(),
            "position": None if self.position is None else self.position.to_json(),
            "streams": self.streams.to_json(),
            "numerics": numerics(),
        }

    def load_from_peer(self, tree: Any, tensors: Mapping[str, torch.Tensor], side: Json) -> None:
        """Load the state that a survivor sent."""
        self._load(tree, lambda name: tensors[name], lambda name: torch.empty_like(tensors[name], device="meta"))
        self.origin = AttemptId.from_optional(side["origin"])
        self.skipped, self.non_finite = int(side["skipped"]), NonFiniteSteps.from_json(side["nonFinite"])
        self.recent = Recent.from_json(side["recent"])
        self.bad_samples, self.roll_back = BadSamples.from_json(side["badSamples"]), None
        self.saved_step = int(side["savedStep"])
        self.metrics = metrics(side)
        self.failures = Failures.from_optional(side.get("failures"))
        self.rates.ramp = Ramp.from_optional(side["ramp"])
        self.position = None if side["position"] is None else Position.from_json(side["position"])
        self.streams = Streams.from_json(side["streams"])
        _compare(side["numerics"], "the rank that sent the state")

    # From a checkpoint

    def load_checkpoint(self, loaded: Loaded, *, rank: int, seeds: Streams) -> None:
        """Load the state of a checkpoint. `seeds` are those of this world, for a checkpoint that has none."""
        manifest = loaded.manifest
        side = _Side.read(manifest.state, manifest.data)  # before anything is changed
        other = self._load(
            manifest.objects,
            lambda name: adopt(manifest.tensors[name], loaded.tensors[name]),
            lambda name: on_meta(manifest.tensors[name]),
        )
        if rank == 0:
            log_replaced_settings(other)
        self.rank_state = RankState(step=manifest.step)
        self.origin = manifest.attempt_id
        self.skipped, self.rates.ramp, self.position = side.skipped, side.ramp, side.position
        self.metrics = metrics(manifest.state)
        self.failures = Failures.from_optional(manifest.state.get("failures"))
        self.non_finite, self.bad_samples = side.non_finite.with_finite(), side.bad_samples
        self.recent, self.out_of_memory = side.recent, latest(self.out_of_memory, side.out_of_memory)
        self.saved_step = manifest.step
        self.streams = side.streams or seeds
        _compare(manifest.numerics, "the checkpoint")

    def roll_back_to_here(self, roll_back: RollBack) -> None:
        """Record that a roll-back restored this state. Its samples are not used again."""
        self.roll_back = roll_back
        self.non_finite = replace(roll_back.record, restored=self.step)
        if self.position is not None:
            self.position = replace(self.position, skipped=roll_back.skipped)

    def start_over(self, seeds: Streams) -> None:
        """Start from the beginning: the objects stay as the script created them."""
        self.rank_state, self.origin, self.position, self.rates.ramp = RankState(), None, None, None
        self.saved_step = 0
        self.metrics, self.bad_samples = {}, BadSamples()
        self.streams = seeds

    def _load(
        self, tree: Any, tensor: Callable[[str], torch.Tensor], on_meta: Callable[[str], torch.Tensor]
    ) -> list[str]:
        rows = all_of_it if self.sharding is None else self.sharding.part
        return load_into(self.objects, tree, tensor, rows, on_meta=on_meta)

    # One step

    def seed(self, rank: int) -> None:
        """Seed the random generators for the next step of a rank."""
        seeds = self.streams.at(self.step, rank)
        rng.seed(python=seeds.python, numpy=seeds.numpy, cpu=seeds.cpu, cuda=seeds.cuda)

    def stepped(self, attempt_id: AttemptId) -> None:
        """Record that the vote on the next step returned, which completes it on this rank."""
        self.rank_state = step_commit.committed(self.rank_state)
        self.origin = attempt_id
        self.roll_back = None


def _compare(saved: Mapping[str, Any], source: str) -> None:
    """Log how this rank's versions and devices differ from those with which a state was computed."""
    current = numerics()
    found = changes(saved, current)
    if found:
        exact = ", although deterministic is set. To repeat the steps exactly, use the same versions and devices"
        _log.warning(
            "numeric settings differ from those of %s: %s. Results may differ in their last bits%s",
            source,
            found,
            exact if current["deterministic"] else "",
        )


@dataclass(frozen=True, kw_only=True)
class _Side:
    """The part of a checkpoint's state outside the objects."""

    skipped: int
    non_finite: NonFiniteSteps
    recent: Recent
    bad_samples: BadSamples
    out_of_memory: OutOfMemory
    ramp: Ramp | None
    position: Position | None
    streams: Streams | None

    @classmethod
    def read(cls, state: Any, data: Any) -> _Side:
        """Parse the state. Raise `StateError` if it is not a job's state."""
        try:
            return cls(
                skipped=int(state.get("counters", {}).get("skipped", 0)),
                non_finite=NonFiniteSteps.from_json(state.get("nonFinite", {})),
                recent=Recent.from_json(state.get("recent", {})),
                bad_samples=BadSamples.from_json(state.get("badSamples", {})),
                out_of_memory=OutOfMemory.from_json(state.get("outOfMemory", {})),
                ramp=Ramp.from_optional(state.get("ramp")),
                position=None if data is None else Position.from_json(data),
                streams=None if state.get("streams") is None else Streams.from_json(state["streams"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise StateError(
                f"the checkpoint's counters or data position are not valid ({error!r}): use an older checkpoint"
            ) from error


def finite(*numbers: float) -> bool:
    return all(math.isfinite(number) for number in numbers)
