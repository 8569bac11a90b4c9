"""The side of a rank process: injects the planned faults, and writes a trace of its steps.

`HOLDFAST_CHAOS` names the folder that a `holdfast chaos` on this host made. It holds

- `plan.json`: the faults at steps; each happens once, even if its victim is replaced (`fired-N` marks it),
- `order-PID`: one fault that this process is to do to itself in its script's code, consumed by removing it,
- `injections` and `trace`: what was done and which steps were made, a JSON line each.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from holdfast.core.environment import Environment, place
from holdfast.core.errors import ChaosError
from holdfast.fault_injection.numbers import Numbers
from holdfast.fault_injection.plan import FOREVER, Fault, Kind
from holdfast.fault_injection.step_trace import Injection, Recorder
from holdfast.telemetry.activity import Activity, Listener

PLAN_FILE = "plan.json"
TRACE_FILE = "trace"
INJECTIONS_FILE = "injections"
# Before these activities, the number of a step rises because state was restored or copied, not because a step was
# made.
_NOT_STEPPING = frozenset({Activity.STARTUP, Activity.RESTORE, Activity.SYNC, Activity.PARKED})


def order_file(folder: Path, pid: int) -> Path:
    """Return the file with the orders of a process."""
    return folder / f"order-{pid}"


def listener(environment: Environment) -> Listener | None:
    """Return the listener for `holdfast chaos` in this process; None without `holdfast chaos`."""
    if environment.chaos is None:
        return None
    return Injector(environment.chaos, place)


def before_read(listeners: Iterable[Listener]) -> Callable[[int], object]:
    """Return the call before each read of a sample. It does nothing without `holdfast chaos`."""
    return next((one.before_read for one in listeners if isinstance(one, Injector)), abs)


class Injector:
    """A listener that injects faults."""

    def __init__(self, folder: Path, position: Callable[[], tuple[int, int]]) -> None:
        self._folder = folder
        self._position = position
        self._plan = [Fault.from_json(one) for one in json.loads((folder / PLAN_FILE).read_text())]
        self._recorder = Recorder(folder / TRACE_FILE)
        self._before = Activity.STARTUP
        self._step = 0
        self._slow = 0.0
        self._slow_steps = 0
        self.numbers = Numbers()
        self._spoils_next = False
        self._bad_samples: set[int] = set()

    def before_read(self, sample: int) -> None:
        """Raise an error for each bad sample. After the fault, the next sample is one from then on."""
        if self._spoils_next:
            self._bad_samples.add(sample)
            self._spoils_next = False
        if sample in self._bad_samples:
            raise ChaosError(f"holdfast chaos: sample {sample} cannot be read")

    def entered(self, activity: Activity, step: int) -> None:
        """Record the completed step, then inject what is due."""
        rank, size = self._position()
        if step > self._step and self._before not in _NOT_STEPPING:
            self._recorder.made(step, rank=rank, size=size)
        # A sharded model computes again after an average: no new step.
        continues_step = activity is Activity.COMPUTE and self._before is Activity.AVERAGE
        self._step, self._before = step, activity
        if continues_step:
            return
        if activity is Activity.COMPUTE:
            self._recorder.begin()
            self.numbers.begin(step)
        for fault in self._due(activity, rank, size):
            self._inject(fault, rank)
        if activity is Activity.COMPUTE and self._slow_steps:
            self._slow_steps -= 1
            time.sleep(self._slow)

    def _due(self, activity: Activity, rank: int, size: int) -> list[Fault]:
        due = [one for one in self._plan if one.is_due(rank=rank, size=size, activity=activity, step=self._step)]
        ordered = self._ordered() if activity is Activity.COMPUTE else None
        self._plan = [one for one in self._plan if one not in due]
        return [one for one in due if self._first(one)] + ([ordered] if ordered else [])

    def _first(self, fault: Fault) -> bool:
        """Whether no process has injected it yet."""
        try:
            (self._folder / f"fired-{fault.number}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _ordered(self) -> Fault | None:
        file = order_file(self._folder, os.getpid())
        try:
            fault = Fault.from_json(json.loads(file.read_text()))
            file.unlink()
        except FileNotFoundError:
            return None
        return fault

    def _inject(self, fault: Fault, rank: int) -> None:
        injection = Injection.of(fault.number, str(fault.kind), rank=rank, pid=os.getpid(), step=self._step)
        injection.append_to(self._folder / INJECTIONS_FILE)
        match fault.kind:
            case Kind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Kind.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Kind.EXCEPTION:
                raise ChaosError(f"holdfast chaos: an exception in rank {rank} before step {self._step + 1}")
            case Kind.SLEEP:
                time.sleep(fault.seconds or FOREVER)
            case Kind.SLOW:
                self._slow, self._slow_steps = fault.seconds or 0.0, fault.steps
            case Kind.NAN_LOSS | Kind.NAN_GRADIENT | Kind.NAN_WEIGHT | Kind.FLIP_WEIGHT | Kind.OOM:
                self.numbers.inject(fault.kind, fault.steps)
            case Kind.BAD_SAMPLE:
                self._spoils_next = True
