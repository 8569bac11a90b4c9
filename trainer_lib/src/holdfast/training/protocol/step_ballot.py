"""The values that the ranks of a world agree on at the end of each global batch, in one small collective. Pure.

Every rank contributes flags, which of its parameters have a gradient, and a few sums. The collective is a maximum,
which is a logical OR for the flags. Each rank's sums have separate slots, so that every rank adds the same numbers in
the same order and gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.telemetry.step_pace import StepPace
from holdfast.training.data.sample_audit import Audit

_FLAGS: Final = 9
_SLOT: Final = 10
_NOTHING: Final = float("-inf")
# Doubles represent 53 bits exactly, so a hash is sent in halves.
_HALF: Final = 32


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """One rank's contribution. `loss` is a sum that is already weighted by `weight`.

    - `quiesce` ends the attempt after a checkpoint. With `node_local`, it is also saved in memory and on other nodes.
    - `pause` ends the attempt without a checkpoint, unless a rank is `bound`: it cannot take its state into another
      attempt.
    - `busy`: this rank is still writing a checkpoint.
    - `urgent`: a checkpoint is needed at once, without a rate limit.
    - `bad_samples`: this rank could not read some of its samples.
    """

    checkpoint: bool
    quiesce: bool
    non_finite: bool
    pause: bool = False
    bound: bool = False
    node_local: bool = False
    busy: bool = False
    urgent: bool = False
    bad_samples: bool = False
    touched: Sequence[bool]
    loss: float
    weight: float
    seen: Audit
    pace: StepPace = StepPace()  # noqa: RUF009  (frozen)


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """The result of the collective, which is the same on every rank."""

    checkpoint: bool
    quiesce: bool
    non_finite: bool
    pause: bool
    bound: bool
    node_local: bool
    busy: bool
    urgent: bool
    bad_samples: bool
    touched: tuple[bool, ...]
    loss: float
    weight: float
    seen: Audit
    non_finite_ranks: tuple[int, ...] = ()


def encode(ballot: Ballot, *, rank: int, world_size: int) -> list[float]:
    """Return the numbers of which the ranks compute the maximum."""
    own = [
        ballot.checkpoint,
        ballot.quiesce,
        ballot.non_finite,
        ballot.pause,
        ballot.bound,
        ballot.node_local,
        ballot.busy,
    ]
    flags = [*own, ballot.urgent, ballot.bad_samples, *ballot.touched]
    slots = [_NOTHING] * (_SLOT * world_size)
    loss = 0.0 if ballot.non_finite else ballot.loss
    high, low = divmod(ballot.seen.hash, 1 << _HALF)
    slots[_SLOT * rank : _SLOT * (rank + 1)] = [
        loss,
        ballot.weight,
        float(high),
        float(low),
        float(ballot.seen.count),
        float(ballot.non_finite),
        ballot.pace.data,
        ballot.pace.compute,
        ballot.pace.waiting,
        ballot.pace.weight,
    ]
    return [float(flag) for flag in flags] + slots


def decode(numbers: Sequence[float], *, world_size: int) -> Agreed:
    """Decode the maximum."""
    split = len(numbers) - _SLOT * world_size
    flags = [number > 0 for number in numbers[:split]]
    slots = [numbers[at : at + _SLOT] for at in range(split, len(numbers), _SLOT)]
    weight = sum(slot[1] for slot in slots)
    seen = Audit()
    for slot in slots:
        seen += Audit((int(slot[2]) << _HALF) + int(slot[3]), int(slot[4]))
    return Agreed(
        checkpoint=flags[0],
        quiesce=flags[1],
        non_finite=flags[2],
        pause=flags[3],
        bound=flags[4],
        node_local=flags[5],
        busy=flags[6],
        urgent=flags[7],
        bad_samples=flags[8],
        touched=tuple(flags[_FLAGS:]),
        loss=sum(slot[0] for slot in slots) / weight if weight and not flags[2] else float("nan"),
        weight=weight,
        seen=seen,
        non_finite_ranks=tuple(rank for rank, slot in enumerate(slots) if slot[5]),
    )


def paces(numbers: Sequence[float], *, world_size: int) -> tuple[StepPace, ...]:
    """Return the pace of each rank, in order of ranks."""
    ends = range(len(numbers) - _SLOT * (world_size - 1), len(numbers) + 1, _SLOT)
    slots = (numbers[end - 4 : end] for end in ends)
    return tuple(
        StepPace(data=data, compute=own, waiting=waiting, weight=share) for data, own, waiting, share in slots
    )
