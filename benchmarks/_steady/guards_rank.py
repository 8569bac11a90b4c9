"""One of two ranks, which trains in turns with and without Holdfast's guards.

`steady.py` starts it. Both turns have the same job, model and memory: without guards, functions of the library are
replaced in this process. Rank 0 writes one JSON line per block.

The guards are: the norm of the gradients, the judgement on loss, norm and spikes, the responses, the search for slow
ranks, the seeds of the random generators, the sample of the weights after each step, the comparison of replicas, and
the inspection of the weights in a save. The comparison is measured separately, because it occurs in few turns.
"""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rank import Contestant, Loop, arguments, block, join, say

import holdfast
from _steady.workload import SHAPES, Shape
from holdfast.checkpoint.saving import writer
from holdfast.telemetry.step_pace import StepPace
from holdfast.training.guards.judgement import Judgement
from holdfast.training.guards.spikes import Recent
from holdfast.training.loop import TrainingLoop
from holdfast.training.step import gradient_reducer, stepper

NO_INSPECTION = SimpleNamespace(update=lambda _: None)
APPLIED = Judgement(reason="Committed", applied=True)
OWN_STEPS = 2
ZERO = torch.zeros(())


def guards_of(loop: TrainingLoop) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return the guards of each step: the owner, the name, and a function that does nothing instead."""
    steps = loop._stepper
    return [
        (gradient_reducer, "_norm", lambda _: ZERO),
        (steps._reducer, "norms", lambda **_: [0.0]),
        (stepper, "judge", lambda *_, **__: APPLIED),
        (Recent, "with_step", lambda recent, *_: recent),
        (steps, "_look_for_slow_ranks", lambda *_: None),
        (steps._paces, "add", lambda _: StepPace()),
        (steps, "_seed", lambda: None),
        (steps.weights, "remember", lambda: None),
        (loop._responses, "check_samples", lambda _: None),
        (loop._responses, "carry_out", lambda *_: False),
    ]


@contextmanager
def replaced(calls: list[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Replace functions of the library."""
    with ExitStack() as stack:
        for owner, name, other in calls:
            stack.enter_context(patch.object(owner, name, other))
        yield


def full_window(rng: random.Random) -> Recent:
    """Return the record of as many steps as the guards compare, which takes longest."""
    losses, norms = ([rng.gauss(7.0, 0.3) for _ in range(holdfast.Guards().spike_window)] for _ in range(2))
    return Recent(losses=tuple(losses), norms=tuple(norms))


class Without(Contestant):
    """The same training without guards."""

    def __init__(self, guarded: Loop) -> None:
        self._guarded = guarded

    def turn(self, steps: int) -> float:
        """Return the wall-clock seconds of this many steps."""
        with replaced(guards_of(self._guarded.loop)):
            return self._guarded.turn(steps)

    def step(self, tokens: torch.Tensor) -> None:
        """Make one step."""
        self._guarded.step(tokens)


def own_time(guarded: Loop) -> dict[str, Any]:
    """Return the CPU seconds of the guards and of the gradients' norm within a step, and of the complete step."""
    used: defaultdict[str, float] = defaultdict(float)

    def measured(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **named)
            finally:
                used[name] += time.thread_time() - began

        return timed_call

    calls = [(owner, name, measured(name, getattr(owner, name))) for owner, name, _ in guards_of(guarded.loop)]
    dist.barrier()
    began = time.process_time()
    with replaced(calls):
        guarded.turn(OWN_STEPS)
    seconds = {"step": time.process_time() - began, "own": sum(used.values()), "norm": used["_norm"] + used["norms"]}
    return {"name": "guards", "values": {name: value / OWN_STEPS for name, value in seconds.items()}}


def comparison(loop: TrainingLoop) -> dict[str, Any]:
    """Return the wall-clock and CPU seconds of one comparison of the replicas."""
    dist.barrier()
    cpu = time.process_time()
    seconds = timed(lambda: loop._replicas.check(loop.team))
    return {"name": "comparison", "values": {"wall": seconds, "cpu": time.process_time() - cpu}}


def save(guarded: Loop, *, checked: bool) -> dict[str, float]:
    """Return the seconds for which a save stops training, and those until it is durable."""
    loop = guarded.loop
    guarded.turn(1)  # each checkpoint has its own step
    os.sync()
    dist.barrier()
    with ExitStack() as stack:
        if not checked:
            stack.enter_context(patch.object(writer, "Inspection", lambda *_: NO_INSPECTION))
        before = time.process_time()
        compared = timed(lambda: loop._replicas.check(loop.team)) if checked else 0.0
        begun = timed(lambda: loop._hooks.begin(onward=True))
        rest = timed(loop._hooks.wait)
        if loop._hooks.behind:
            raise SystemExit("a save failed")
    return {"stall": compared + begun, "durable": compared + begun + rest, "cpu": time.process_time() - before}


def saves(guarded: Loop, checked_first: bool) -> dict[str, Any]:
    """Return the seconds of a save with its checks, and of one without."""
    found = {checked: save(guarded, checked=checked) for checked in (checked_first, not checked_first)}
    names = {True: "checked", False: "unchecked"}
    values = {f"{what} {names[checked]}": value for checked, one in found.items() for what, value in one.items()}
    return {"name": "save", "values": values}


def timed(act: Callable[[], object]) -> float:
    """Return the wall-clock seconds of a call."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def main() -> None:
    order = arguments()
    join(order)
    shape: Shape = SHAPES[order.shape]
    guarded = Loop(shape, order.rank, checkpoint_dir=order.folder, checkpoint_interval="1h", keep_last=1)
    without = Without(guarded)
    guarded.turn(order.warm)
    guarded.loop._replicas._steps = 0
    rng = random.Random(5)  # noqa: S311 - an order, the same on both ranks
    guarded.loop._state.recent = full_window(rng)
    save(guarded, checked=True)
    for _ in range(order.blocks):
        say(order.rank, **block(without, guarded, "guards", order.steps, rng.random() < 0.5))
        say(order.rank, **own_time(guarded))
        say(order.rank, **comparison(guarded.loop))
        say(order.rank, **saves(guarded, rng.random() < 0.5))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
