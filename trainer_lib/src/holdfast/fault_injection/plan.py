"""The faults to inject into a job, and their times. Pure: the same seed gives the same plan."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from holdfast.telemetry.activity import Activity

FOREVER = 86_400.0
_SLOW_STEPS = 10
_SLOW_SECONDS = 0.5
_KEYS = ("rank", "step", "at", "seconds", "steps")
_ACTIVITIES = (
    Activity.DATA,
    Activity.COMPUTE,
    Activity.AVERAGE,
    Activity.VOTE,
    Activity.APPLY,
    Activity.CHECKPOINT,
    Activity.EVALUATION,
)
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


class Kind(StrEnum):
    """The kinds of fault."""

    KILL = "kill"
    STOP = "stop"
    EXCEPTION = "exception"
    SLEEP = "sleep"
    SLOW = "slow"
    NAN_LOSS = "nan-loss"
    NAN_GRADIENT = "nan-gradient"
    NAN_WEIGHT = "nan-weight"
    BAD_SAMPLE = "bad-sample"
    OOM = "oom"
    FLIP_WEIGHT = "flip-weight"

    @property
    def in_script(self) -> bool:
        """Whether the rank's main thread injects it, in the script's own code."""
        return self not in {Kind.KILL, Kind.STOP}

    @property
    def lasts(self) -> bool:
        """Whether it can be injected into several successive steps."""
        return self in {Kind.SLOW, Kind.NAN_LOSS, Kind.NAN_GRADIENT, Kind.OOM}


_OWN_ACTIVITIES = {Kind.BAD_SAMPLE: Activity.DATA, Kind.FLIP_WEIGHT: Activity.APPLY}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault at a step. `pick`, from 0 to 1, selects the rank if `rank` does not."""

    number: int
    kind: Kind
    step: int = 0
    rank: int | None = None
    pick: float = 0.0
    at: Activity = Activity.COMPUTE
    seconds: float | None = None
    steps: int = 1

    def is_due(self, *, rank: int, size: int, activity: Activity, step: int) -> bool:
        """Whether the fault is due on this rank, which starts this activity for the step after `step`."""
        victim = int(self.pick * size) if self.rank is None else self.rank
        return rank == victim and activity is self.at and step + 1 >= self.step

    def to_json(self) -> dict[str, Any]:
        """For the rank processes."""
        return {
            "number": self.number,
            "kind": str(self.kind),
            "step": self.step,
            "rank": self.rank,
            "pick": self.pick,
            "at": str(self.at),
            "seconds": self.seconds,
            "steps": self.steps,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Fault:
        return cls(**{**value, "kind": Kind(value["kind"]), "at": Activity(value["at"])})


@dataclass(frozen=True, kw_only=True)
class RandomFault:
    """One fault of a rate: seconds after the previous one, and `pick` selects the rank."""

    after: float
    kind: Kind
    pick: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All faults that `holdfast chaos` injects."""

    seed: int
    faults: tuple[Fault, ...]
    per_second: float
    kinds: tuple[Kind, ...]

    @staticmethod
    def of(kind: Kind) -> Fault:
        """Return a fault of a rate with the default duration and slowdown."""
        slow = kind is Kind.SLOW
        return Fault(number=0, kind=kind, seconds=_SLOW_SECONDS if slow else None, steps=_SLOW_STEPS if slow else 1)

    def random_faults(self) -> Iterator[RandomFault]:
        """Yield faults at random times with this mean rate per second, without an end."""
        source = random.Random(f"strikes {self.seed}")  # noqa: S311  (a schedule, not a secret)
        while self.per_second:
            after = source.expovariate(self.per_second)
            yield RandomFault(after=after, kind=source.choice(self.kinds), pick=source.random())


def make_plan(*, seed: int, specs: Sequence[tuple[Kind, str]], per_second: float, kinds: Sequence[Kind]) -> Plan:
    """Give each fault a number, and a rank if it has none. Raises `ValueError` for a fault that is not valid."""
    source = random.Random(f"faults {seed}")  # noqa: S311
    faults = [
        read_fault(kind, text, number=number, pick=source.random()) for number, (kind, text) in enumerate(specs, 1)
    ]
    return Plan(seed=seed, faults=tuple(faults), per_second=per_second, kinds=tuple(kinds))


def read_fault(kind: Kind, text: str, *, number: int = 1, pick: float = 0.0) -> Fault:
    """Parse a fault, for example `rank=1,step=50,…`."""
    given = _read_fields(kind, text)
    if "step" not in given:
        raise ValueError("expected step=N, for example step=50; for faults at random instants use --rate")
    if "at" in given and kind.in_script:
        raise ValueError(f"at= is not valid for {kind}, which happens in the script; leave it out")
    rank = given.get("rank")
    seconds = _number(given["seconds"], "seconds") if "seconds" in given else None
    if kind is Kind.SLOW and seconds is None:
        raise ValueError("expected seconds=N, the time that is added to each step, for example seconds=0.5")
    return Fault(
        number=number,
        kind=kind,
        step=_count(given["step"], "step", least=1),
        rank=None if rank is None else _count(rank, "rank", least=0),
        pick=pick,
        at=_OWN_ACTIVITIES.get(kind) or _activity(given.get("at", str(Activity.COMPUTE))),
        seconds=seconds,
        steps=_count(given.get("steps", str(_SLOW_STEPS if kind is Kind.SLOW else 1)), "steps", least=1),
    )


def read_rate(text: str) -> float:
    """Parse a rate, for example `2/min`, in faults per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)/(s|min|h)", text, re.ASCII)
    if match is None or not float(match[1]):
        raise ValueError("expected a number of faults per time, for example 2/min or 10/h")
    return float(match[1]) / _UNITS[match[2]]


def read_kinds(text: str) -> tuple[Kind, ...]:
    """Parse kinds, for example `kill,stop`."""
    known = [str(kind) for kind in Kind]
    names = text.split(",")
    if not set(names) <= set(known):
        raise ValueError(f"expected some of {', '.join(known)}, separated by commas")
    return tuple(Kind(name) for name in names)


def _read_fields(kind: Kind, text: str) -> dict[str, str]:
    allowed = {*_KEYS} - (set() if kind.lasts else {"steps"})
    if kind not in {Kind.STOP, Kind.SLEEP, Kind.SLOW}:
        allowed.discard("seconds")
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in allowed or not value:
            names = ", ".join(f"{key}=…" for key in _KEYS if key in allowed)
            raise ValueError(f"{part!r}: expected some of {names}, separated by commas, for example rank=1,step=50")
        if name in fields:
            raise ValueError(f"expected {name}= once; repeat the option for another fault")
        fields[name] = value
    return fields


def _count(text: str, name: str, *, least: int) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < least:
        raise ValueError(f"{name}={text}: expected an integer of at least {least}")
    return int(text)


def _number(text: str, name: str) -> float:
    if re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII) is None or not float(text):
        raise ValueError(f"{name}={text}: expected a number above 0")
    return float(text)


def _activity(text: str) -> Activity:
    if text not in {str(one) for one in _ACTIVITIES}:
        raise ValueError(f"at={text}: expected one of {', '.join(_ACTIVITIES)}")
    return Activity(text)
