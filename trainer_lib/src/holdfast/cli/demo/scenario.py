"""The demo: form a world, inject four faults, and check the result."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast.cli.demo.launchers import COUNT, PACE_FILE, Launchers
from holdfast.cli.demo.report import Check, CostLimit, Outcome, held, table
from holdfast.cli.support.child_process import swept_folder
from holdfast.core.errors import DemoError
from holdfast.fault_injection.step_trace import (
    StepRecord,
    Trace,
    first_after,
    longest_pause,
    lost_steps,
    steps_of_all,
)

MAX_STEPS = 450
# The time that a busy host may need. Each fault has its own limit in its promise.
TIMEOUT = 120.0
READY_TIMEOUT = 240.0
_POLL_SECONDS = 0.01
_TRAINING_STEPS = 12
# Train slowly while the launchers load standby processes, so that enough steps remain for the faults.
_SLOW_SECONDS = 0.25
_PACE_SECONDS = 0.06
# In the last steps the training is slower, so that some steps remain for each fault.
_SCARCE_STEPS = 100
_SCARCE_SECONDS = 1.0
_STATUS_SECONDS = 0.5
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

KILLED = CostLimit(fault="rank process SIGKILLed", seconds=3.0)
STOPPED = CostLimit(fault="rank process stopped (SIGSTOP)", seconds=4.0)
SHRUNK = CostLimit(fault="launcher killed, 3 -> 2", seconds=3.0, size=2)
GROWN = CostLimit(fault="launcher joins, 2 -> 3", seconds=15.0, size=3)


def run_demo(environ: Mapping[str, str]) -> int:
    """Run the demo; the exit code is 0 only if all promises held."""
    before = {number: signal.signal(number, _interrupt) for number in _ENDINGS}
    try:
        with swept_folder("holdfast-demo-") as root:
            return _Demo(root, environ).run()
    except SystemExit as requested:
        _print("the demo was asked to end; nothing is left behind")
        return int(str(requested.code))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    for each in _ENDINGS:
        signal.signal(each, signal.SIG_IGN)  # one is enough
    raise SystemExit(128 + number)


class _Demo:
    def __init__(self, root: Path, environ: Mapping[str, str]) -> None:
        self._root = root
        self._launchers = Launchers(root, max_steps=MAX_STEPS, environ=environ)
        self._trace = Trace(root / "trace")
        self._started = time.monotonic()
        self._size = 0
        self._reported: set[str] = set()
        self._over = False
        self._scarce = False
        self._outcomes: list[Outcome] = []

    def run(self) -> int:
        try:
            self._course()
        except DemoError as lost:
            self._log("FAILED", f"{lost}; the last output of the launchers:")
            for number in range(COUNT):
                _print(self._launchers.log(number))
        finally:
            self._launchers.stop()
        checks = self._checks()
        _print("\n" + table(self._outcomes, checks))
        return 0 if held(self._outcomes, checks) and len(self._outcomes) == len(_FAULTS) else 1

    def _course(self) -> None:
        self._pace(_SLOW_SECONDS)
        self._log("demo", f"{COUNT} launchers on this host, one rank each; only this host is used")
        self._launchers.start(0)  # the first owns the endpoint; its loss would end the run
        self._wait(lambda: bool(self._launchers.status(0)), "the first launcher does not start")
        for number in range(1, COUNT):
            self._launchers.start(number)
        self._wait_for_training(time.monotonic(), "training never began", timeout=READY_TIMEOUT)
        self._log("demo", "the job trains; each launcher prepares a warm process")
        ready = self._launchers.has_standby
        self._wait(lambda: all(map(ready, range(COUNT))), "no warm process is on standby", timeout=READY_TIMEOUT)
        self._pace(_PACE_SECONDS)
        self._log("demo", "from now on the demo injects faults")
        for expected, inject in _FAULTS:
            self._outcomes.append(self._inject(expected, inject))
            if self._outcomes[-1].next_step is None:
                raise DemoError(f"no step within {TIMEOUT:.0f} s after: {expected.fault}")
            if expected is not SHRUNK:  # the next one is its end
                self._wait_for_training(time.monotonic(), "the world of three did not come back")
        self._log("demo", f"all faults are injected; the rest of {MAX_STEPS} steps runs without pauses")
        self._pace(0.0)
        self._over = True
        self._wait(lambda: None not in self._launchers.exit_codes(), "the job did not end", timeout=READY_TIMEOUT)

    def _inject(self, expected: CostLimit, inject: Callable[[_Demo], None]) -> Outcome:
        """Inject one fault and wait for the step after it."""
        moment, wall = time.monotonic(), time.time()
        inject(self)
        found = self._next_step(expected, moment)
        self._wait_for_status(expected, wall)
        noticed = None if expected is GROWN else self._noticed(wall)
        if found is None:
            return Outcome(expected=expected, noticed=noticed)
        lost = lost_steps(self._trace.records, moment)
        text = f"step {found.step} by {found.size} ranks, {found.time - moment:.2f} s later; {lost} steps lost"
        origin = "" if expected is GROWN else self._origin(wall)
        text += f"; state from: {origin}" if origin else ""
        if expected is GROWN:
            text += f"; the others paused for {longest_pause(self._trace.records, moment, found.time):.2f} s"
        self._log("resumed", text)
        return Outcome(expected=expected, noticed=noticed, next_step=found.time - moment, lost=lost)

    def _next_step(self, expected: CostLimit, moment: float) -> StepRecord | None:
        """Return the first step that started after the fault, in a world of the promised size; None without one."""

        def made() -> StepRecord | None:
            return first_after(
                self._trace.records, moment, accept=lambda record: expected.size in (None, record.size)
            )

        try:
            self._wait(lambda: made() is not None, expected.fault)
        except DemoError:
            return None
        return made()

    # The faults

    def kill_rank(self) -> None:
        """SIGKILL to a rank process."""
        rank, pid = self._victim(1)
        self._log("FAULT", f"SIGKILL to rank {rank} (pid {pid}) of launcher 1")
        os.kill(pid, signal.SIGKILL)

    def stop_rank(self) -> None:
        """SIGSTOP to a rank process."""
        rank, pid = self._victim(2)
        self._log("FAULT", f"SIGSTOP to rank {rank} (pid {pid}) of launcher 2: it hangs")
        os.kill(pid, signal.SIGSTOP)

    def kill_launcher(self) -> None:
        """Kill a launcher and its rank, like the loss of a machine."""
        self._log("FAULT", "SIGKILL to launcher 2: its rank ends with it")
        self._launchers.kill(2)

    def start_launcher(self) -> None:
        """Start the launcher again, like the return of a machine."""
        self._log("GROWTH", "launcher 2 is started again")
        self._launchers.start(2)

    def _pace(self, seconds: float) -> None:
        """Set the pause of the training after each step."""
        if self._scarce and seconds > 0:
            seconds = _SCARCE_SECONDS
        temporary = self._root / ".pace"
        temporary.write_text(str(seconds))
        temporary.rename(self._root / PACE_FILE)

    # Waiting, and printing events meanwhile

    def _victim(self, number: int) -> tuple[int, int]:
        found = self._launchers.rank_of(number)
        if found is None:
            raise DemoError(f"launcher {number} has no rank process")
        return found

    def _wait_for_training(self, since: float, lost: str, *, timeout: float = TIMEOUT) -> None:
        self._wait(
            lambda: steps_of_all(self._trace.records, since, size=COUNT) >= _TRAINING_STEPS, lost, timeout=timeout
        )

    def _wait_for_status(self, expected: CostLimit, wall: float) -> None:
        """Wait for a launcher's status, which follows its step within a fraction of a second."""
        end = time.monotonic() + (0.0 if expected is GROWN else _STATUS_SECONDS)
        self._wait(lambda: self._noticed(wall) is not None or time.monotonic() > end, "")

    def _wait(self, condition: Callable[[], bool], lost: str, *, timeout: float = TIMEOUT) -> None:
        end = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > end:
                raise DemoError(lost)
            self._poll()
            time.sleep(_POLL_SECONDS)

    def _poll(self) -> None:
        for record in self._trace.read():
            if record.size != self._size:
                self._size = record.size
                self._log(
                    "training", f"a world of {record.size} completes step {record.step}, loss {record.loss or 0:.2f}"
                )
            if record.step >= MAX_STEPS - _SCARCE_STEPS and not self._scarce and not self._over:
                self._scarce = True
                self._pace(_SCARCE_SECONDS)
        for incident in [] if self._over else self._launchers.incidents():
            text = f"{incident['cause']}/{incident['reason']}: {incident['message']}"
            if text not in self._reported:
                self._reported.add(text)
                self._log("noticed", text)

    def _noticed(self, wall: float) -> float | None:
        moments = map(_moment, self._launchers.incidents())
        later = [moment - wall for moment in moments if moment >= wall]
        return min(later, default=None)

    def _origin(self, wall: float) -> str:
        """Return the source of the state from which the ranks continued."""
        later = [one for one in self._launchers.incidents() if _moment(one) >= wall]
        return next((str(one["restoredFrom"]) for one in later if one.get("restoredFrom")), "")

    def _checks(self) -> list[Check]:
        codes = self._launchers.exit_codes()
        try:
            audit = json.loads((self._root / "audit.json").read_text())
        except FileNotFoundError:
            audit = {"ok": False, "samples": 0}
        losses = [record.loss for record in self._trace.records if record.loss is not None]
        return [
            Check(what=f"the job is complete: {MAX_STEPS} steps", held=codes == [0] * COUNT),
            Check(what=f"every sample exactly once ({audit['samples']} samples)", held=bool(audit["ok"])),
            Check(
                what="loss decreased: {:.2f} -> {:.2f}".format(*((losses[0], losses[-1]) if losses else (0.0, 0.0))),
                held=bool(losses) and losses[-1] < losses[0],
            ),
        ]

    def _log(self, what: str, text: str) -> None:
        _print(f"{time.monotonic() - self._started:7.1f} s  {what:<9} {text}")


def _moment(incident: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(incident["detectedTime"]).timestamp()


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


_FAULTS: tuple[tuple[CostLimit, Callable[[_Demo], None]], ...] = (
    (KILLED, _Demo.kill_rank),
    (STOPPED, _Demo.stop_rank),
    (SHRUNK, _Demo.kill_launcher),
    (GROWN, _Demo.start_launcher),
)
