"""Random traces over `tiers.World`, and the shortest trace that still violates an invariant.

A trace is a list of rules with small numbers. Every number is taken modulo what there is to choose from, so each part
of a trace is a trace, and shrinking only removes rules and lowers numbers. The same seed gives the same traces.
"""

from __future__ import annotations

import ast
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tier_ledger import Counts, Shape, ViolationError
from tiers import World

Rule = tuple[str, *tuple[int, ...]]
Trace = tuple[Rule, ...]

# The rules, the bounds of their numbers, and their weights.
STOPS, FAULTS = 14, 240
BOUNDS: dict[str, tuple[tuple[int, ...], int]] = {
    "start": ((4, 3, STOPS, FAULTS), 4),
    "save": ((3, 3, STOPS, FAULTS), 8),
    "upload": ((3, 3, STOPS, FAULTS), 6),
    "resume": ((3, 6), 5),
    "rewind": ((3, STOPS), 1),
    "outage": ((3,), 2),
    "damage": ((3, 3, 4), 3),
    "snapshot": ((), 1),
    "rollback": ((), 1),
    "lose": ((2,), 1),
}
EXPLORERS = frozenset({"outage", "damage", "snapshot", "rollback", "lose"})
LONGEST = 30


@dataclass(frozen=True, kw_only=True)
class Focus:
    """A few rules that affect each other, with equal weights, and the rates of stops and faults."""

    rules: tuple[str, ...]
    stop: float = 0
    fault: float = 0


CLAIMS = Focus(rules=("start", "save", "resume"), stop=0.7)
REWINDS = Focus(rules=("start", "save", "save", "upload", "resume", "rewind"), stop=0.3)
UPLOADS = Focus(rules=("start", "save", "upload", "upload", "resume", "damage"), stop=0.5, fault=0.2)
RESTORES = Focus(rules=("start", "save", "save", "upload", "damage", "outage"))


@dataclass(frozen=True, kw_only=True)
class Found:
    """A trace that violates an invariant."""

    shape: Shape
    trace: Trace
    message: str
    story: tuple[str, ...]

    @property
    def invariant(self) -> str:
        """The name of the invariant."""
        return self.message.partition(":")[0]

    def __str__(self) -> str:
        rules = "\n".join(f"    {rule!r}," for rule in self.trace)
        story = "\n".join(f"  {line}" for line in self.story)
        return f"{self.message}\n{self.shape}\ntrace = (\n{rules}\n)\n{story}"


def shape_of(rng: random.Random) -> Shape:
    """Choose the shape of the jobs of a trace."""
    return Shape(
        keep_last=rng.choice((1, 2, 2, 3)),
        full_every=rng.choice((1, 1, 2, 3)),
        bucket=rng.random() < 0.85,
        memory=rng.random() < 0.4,
        local=rng.random() < 0.4,
    )


def trace_of(rng: random.Random) -> Trace:
    """Choose rules. Each trace omits some rules and prefers others, which reaches rare combinations sooner."""
    first: Rule = ("start", 2, 0, 0, 0)
    if rng.random() < 0.6:
        focus = rng.choice((CLAIMS, UPLOADS, RESTORES, REWINDS))
        chance = _Chance(rng, old=0.3, stop=focus.stop, fault=focus.fault)
        names = rng.choices(focus.rules, k=rng.randint(4, LONGEST))
        return (first, *(chance.rule(name, 2 if name == "start" else 3) for name in names))
    weights = {name: weight * rng.choice((0, 1, 1, 4)) for name, (_, weight) in BOUNDS.items()}
    weights |= {name: max(weights[name], BOUNDS[name][1]) for name in ("start", "save")}
    chance = _Chance(rng, old=rng.choice((0.1, 0.5)), stop=rng.choice((0, 0.3, 0.5)), fault=rng.choice((0, 0, 0.2)))
    names = rng.choices([*weights], [*weights.values()], k=rng.randint(4, LONGEST))
    return (first, *(chance.rule(name, 4 if name == "start" else 3) for name in names))


@dataclass(frozen=True)
class _Chance:
    """How often a trace chooses a value other than the simplest."""

    rng: random.Random
    old: float
    stop: float
    fault: float

    def rule(self, name: str, kinds: int) -> Rule:
        bounds, numbers = BOUNDS[name][0], []
        for place, bound in enumerate(bounds):
            most = min(bound, kinds) if place == 0 else bound
            numbers.append(self._number(most, self.old if place == 0 and name != "start" else 0.6))
        return (name, *numbers)

    def _number(self, bound: int, chance: float) -> int:
        rng = self.rng
        if bound == STOPS:  # most operations have few changes
            return min(bound, 1 + int(rng.expovariate(0.5))) if rng.random() < self.stop else 0
        return rng.randrange(bound) if rng.random() < (self.fault if bound == FAULTS else chance) else 0


@contextmanager
def workplace() -> Iterator[Path]:
    """Provide a folder in memory, where an fsync costs nothing, and reduce logging."""
    memory = Path("/dev/shm")
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        try:
            yield Path(folder)
        finally:
            logging.disable(before)


def play(folder: Path, shape: Shape, trace: Trace, counts: Counts | None = None) -> Found | None:
    """Run a trace from empty tiers."""
    root = folder / "world"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    world = World(root, shape)
    try:
        with world.running():
            for name, *numbers in trace:
                world.counts.rules[name] = world.counts.rules.get(name, 0) + 1
                getattr(world, name)(*numbers)
                world.after(explorer=name in EXPLORERS)
            world.end()
            world.after(explorer=False)
    except ViolationError as error:
        return Found(shape=shape, trace=trace, message=str(error), story=tuple(world.story))
    finally:
        world.close()
        if counts is not None:
            counts.add(world.counts)
    return None


def shrink(folder: Path, found: Found) -> Found:
    """Return the shortest and simplest trace that violates the same invariant."""
    better: Found | None = found
    while better is not None:
        found = better
        better = next((one for one in map(_tried(folder, found), _smaller(found)) if one is not None), None)
    return found


class _tried:  # noqa: N801 - used like a function
    def __init__(self, folder: Path, like: Found) -> None:
        self._folder, self._like = folder, like

    def __call__(self, smaller: tuple[Shape, Trace]) -> Found | None:
        found = play(self._folder, *smaller)
        return found if found is not None and found.invariant == self._like.invariant else None


def _smaller(found: Found) -> Iterator[tuple[Shape, Trace]]:
    shape, trace = found.shape, found.trace
    size = len(trace) // 2
    while size:
        for begin in range(len(trace) - size, -1, -1):
            yield shape, trace[:begin] + trace[begin + size :]
        size //= 2
    plain = (
        Shape(keep_last=shape.keep_last, bucket=shape.bucket, memory=False, local=False),
        Shape(keep_last=1, full_every=shape.full_every, bucket=shape.bucket, memory=shape.memory, local=shape.local),
        Shape(
            keep_last=shape.keep_last,
            full_every=shape.full_every,
            bucket=False,
            memory=shape.memory,
            local=shape.local,
        ),
    )
    for other in plain:
        if other != shape:
            yield other, trace
    for at, (name, *numbers) in enumerate(trace):
        for place, number in enumerate(numbers):
            for lower in sorted({0, number // 2, number - 1} & {*range(number)}):
                changed: Rule = (name, *numbers[:place], lower, *numbers[place + 1 :])
                yield shape, (*trace[:at], changed, *trace[at + 1 :])


def explore(folder: Path, seed: int, numbers: range, counts: Counts) -> tuple[int, Found] | None:
    """Run traces of a seed. Return the number of the first trace that violates an invariant, and the trace."""
    for number in numbers:
        rng = random.Random(f"{seed}-{number}")
        found = play(folder, shape_of(rng), trace_of(rng), counts)
        if found is not None:
            return number, found
    return None


def parse(text: str) -> Trace:
    """Parse a trace as it is printed."""
    value: Sequence[Rule] = ast.literal_eval(text)
    return tuple(value)
