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
from holdfast.cli.demo.report import Check, Outcome, Promise, held, table
from holdfast.cli.support.child_process import swept_folder
from holdfast.core.errors import DemoError
from holdfast.fault_injection.step_trace import Mark, Trace, first_after, longest_pause, lost_steps, steps_of_all

MAX_STEPS = 450
# The time that a busy host may need. Each fault has its own limit in its promise.
PATIENCE = 120.0
READY_PATIENCE = 240.0
_POLL_SECONDS = 0.01
_CALM_STEPS = 12
# Train slowly while the launchers load standby processes, so that enough steps remain for the faults.
_SLOW_SECONDS = 0.25
_PACE_SECONDS = 0.06
# In the last steps the training is slower, so that some steps remain for each fault.
_SCARCE_STEPS = 100
_SCARCE_SECONDS = 1.0
_WORD_SECONDS = 0.5
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

KILLED = Promise(fault="rank process SIGKILLed", seconds=3.0)
STOPPED = Promise(fault="rank process stopped (SIGSTOP)", seconds=4.0)
SHRUNK = Promise(fault="launcher killed, 3 -> 2", seconds=3.0, size=2)
GROWN = Promise(fault="launcher joins, 2 -> 3", seconds=15.0, size=3)


def play(environ: Mapping[str, str]) -> int:
    """Run the demo; the exit code is 0 only if all promises held."""
    before = {number: signal.signal(number, _interrupt) for number in _ENDINGS}
    try:
        with swept_folder("holdfast-demo-") as root:
            return _Demo(root, environ).run()
    except SystemExit as asked:
        _print("the demo was asked to end; nothing is left behind")
        return int(str(asked.code))
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
        self._told: set[str] = set()
        self._over = False
        self._scarce = False
        self._outcomes: list[Outcome] = []

    def run(self) -> int:
        try:
            self._course()
        except DemoError as lost:
            self._say("FAILED", f"{lost}; the last output of the launchers:")
            for number in range(COUNT):
                _print(self._launchers.log(number))
        finally:
            self._launchers.stop()
        checks = self._checks()
        _print("\n" + table(self._outcomes, checks))
        return 0 if held(self._outcomes, checks) and len(self._outcomes) == len(_FAULTS) else 1

    def _course(self) -> None:
        self._pace(_SLOW_SECONDS)
        self._say("demo", f"{COUNT} launchers on this host, one rank each; only this host is used")
        self._launchers.start(0)  # the first owns the endpoint; its loss would end the run
        self._wait(lambda: bool(self._launchers.status(0)), "the first launcher does not start")
        for number in range(1, COUNT):
            self._launchers.start(number)
        self._calm(time.monotonic(), "training never began", patience=READY_PATIENCE)
        self._say("demo", "the job trains; each launcher prepares a warm process")
        ready = self._launchers.stands_by
        self._wait(lambda: all(map(ready, range(COUNT))), "no warm process is on standby", patience=READY_PATIENCE)
        self._pace(_PACE_SECONDS)
        self._say("demo", "from now on the demo injects faults")
        for promise, hurt in _FAULTS:
            self._outcomes.append(self._suffer(promise, hurt))
            if self._outcomes[-1].next_step is None:
                raise DemoError(f"no step within {PATIENCE:.0f} s after: {promise.fault}")
            if promise is not SHRUNK:  # the next one is its end
                self._calm(time.monotonic(), "the world of three did not come back")
        self._say("demo", f"all faults are injected; the rest of {MAX_STEPS} steps runs without pauses")
        self._pace(0.0)
        self._over = True
        self._wait(lambda: None not in self._launchers.exit_codes(), "the job did not end", patience=READY_PATIENCE)

    def _suffer(self, promise: Promise, hurt: Callable[[_Demo], None]) -> Outcome:
        """Inject one fault and wait for the step after it."""
        moment, wall = time.monotonic(), time.time()
        hurt(self)
        found = self._next_step(promise, moment)
        self._wait_a_little_for_word(promise, wall)
        noticed = None if promise is GROWN else self._noticed(wall)
        if found is None:
            return Outcome(promise=promise, noticed=noticed)
        lost = lost_steps(self._trace.marks, moment)
        text = f"step {found.step} by {found.size} ranks, {found.time - moment:.2f} s later; {lost} steps lost"
        origin = "" if promise is GROWN else self._origin(wall)
        text += f"; state from: {origin}" if origin else ""
        if promise is GROWN:
            text += f"; the others paused for {longest_pause(self._trace.marks, moment, found.time):.2f} s"
        self._say("resumed", text)
        return Outcome(promise=promise, noticed=noticed, next_step=found.time - moment, lost=lost)

    def _next_step(self, promise: Promise, moment: float) -> Mark | None:
        """Return the first step that started after the fault, in a world of the promised size; None without one."""

        def made() -> Mark | None:
            return first_after(self._trace.marks, moment, wanted=lambda mark: promise.size in (None, mark.size))

        try:
            self._wait(lambda: made() is not None, promise.fault)
        except DemoError:
            return None
        return made()

    # The faults

    def kill_rank(self) -> None:
        """SIGKILL to a rank process."""
        rank, pid = self._victim(1)
        self._say("FAULT", f"SIGKILL to rank {rank} (pid {pid}) of launcher 1")
        os.kill(pid, signal.SIGKILL)

    def stop_rank(self) -> None:
        """SIGSTOP to a rank process."""
        rank, pid = self._victim(2)
        self._say("FAULT", f"SIGSTOP to rank {rank} (pid {pid}) of launcher 2: it hangs")
        os.kill(pid, signal.SIGSTOP)

    def kill_launcher(self) -> None:
        """Kill a launcher and its rank, like the loss of a machine."""
        self._say("FAULT", "SIGKILL to launcher 2: its rank ends with it")
        self._launchers.kill(2)

    def start_launcher(self) -> None:
        """Start the launcher again, like the return of a machine."""
        self._say("GROWTH", "launcher 2 is started again")
        self._launchers.start(2)

    def _pace(self, seconds: float) -> None:
        """Set the pause of the training after each step."""
        if self._scarce and seconds > 0:
            seconds = _SCARCE_SECONDS
        beside = self._root / ".pace"
        beside.write_text(str(seconds))
        beside.rename(self._root / PACE_FILE)

    # Waiting, and printing events meanwhile

    def _victim(self, number: int) -> tuple[int, int]:
        found = self._launchers.rank_of(number)
        if found is None:
            raise DemoError(f"launcher {number} has no rank process")
        return found

    def _calm(self, since: float, lost: str, *, patience: float = PATIENCE) -> None:
        self._wait(lambda: steps_of_all(self._trace.marks, since, size=COUNT) >= _CALM_STEPS, lost, patience=patience)

    def _wait_a_little_for_word(self, promise: Promise, wall: float) -> None:
        """Wait for a launcher's status, which follows its step within a fraction of a second."""
        end = time.monotonic() + (0.0 if promise is GROWN else _WORD_SECONDS)
        self._wait(lambda: self._noticed(wall) is not None or time.monotonic() > end, "")

    def _wait(self, condition: Callable[[], bool], lost: str, *, patience: float = PATIENCE) -> None:
        end = time.monotonic() + patience
        while not condition():
            if time.monotonic() > end:
                raise DemoError(lost)
            self._look()
            time.sleep(_POLL_SECONDS)

    def _look(self) -> None:
        for mark in self._trace.read():
            if mark.size != self._size:
                self._size = mark.size
                self._say("training", f"a world of {mark.size} completes step {mark.step}, loss {mark.loss or 0:.2f}")
            if mark.step >= MAX_STEPS - _SCARCE_STEPS and not self._scarce and not self._over:
                self._scarce = True
                self._pace(_SCARCE_SECONDS)
        for incident in [] if self._over else self._launchers.incidents():
            text = f"{incident['cause']}/{incident['reason']}: {incident['message']}"
            if text not in self._told:
                self._told.add(text)
                self._say("noticed", text)

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
        losses = [mark.loss for mark in self._trace.marks if mark.loss is not None]
        return [
            Check(what=f"the job is complete: {MAX_STEPS} steps", held=codes == [0] * COUNT),
            Check(what=f"every sample exactly once ({audit['samples']} samples)", held=bool(audit["ok"])),
            Check(
                what="loss decreased: {:.2f} -> {:.2f}".format(*((losses[0], losses[-1]) if losses else (0.0, 0.0))),
                held=bool(losses) and losses[-1] < losses[0],
            ),
        ]

    def _say(self, what: str, text: str) -> None:
        _print(f"{time.monotonic() - self._started:7.1f} s  {what:<9} {text}")


def _moment(incident: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(incident["detectedTime"]).timestamp()


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


_FAULTS: tuple[tuple[Promise, Callable[[_Demo], None]], ...] = (
    (KILLED, _Demo.kill_rank),
    (STOPPED, _Demo.stop_rank),
    (SHRUNK, _Demo.kill_launcher),
    (GROWN, _Demo.start_launcher),
)
