"""`holdfast chaos`: a `holdfast run` with injected faults.

A rank injects faults at steps itself (`injector.py`). This process injects those of a rate: kill and stop with a
signal at a random time, the others with an order that the rank reads. Only ranks of the launcher on this host are
affected.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast.cli.chaos.report import costs, summary
from holdfast.cli.support import child_process
from holdfast.core.environment import variable, variables
from holdfast.fault_injection.injector import INJECTIONS_FILE, PLAN_FILE, TRACE_FILE, order_file
from holdfast.fault_injection.plan import Kind, Plan, RandomFault
from holdfast.fault_injection.step_trace import Injection, JsonLines, Trace
from holdfast.launcher.host.run_dir import STATUS_FILE
from holdfast.launcher.membership.state import Phase
from holdfast.launcher.process.child import own_program

_POLL_SECONDS = 0.02
# Seconds after the start of the ranks until the first fault, for a script that makes no steps with Holdfast.
_FIRST_FAULT_SECONDS = 20.0
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def run(plan: Plan, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run `holdfast run` with these arguments and this plan, and return its exit code."""
    with child_process.swept_folder("holdfast-chaos-") as folder:
        (folder / PLAN_FILE).write_text(json.dumps([fault.to_json() for fault in plan.faults]))
        run_dir = Path(environ.get(variable("run_dir")) or folder / "run")
        run_dir.mkdir(parents=True, exist_ok=True)
        own = variables(chaos=folder, run_dir=run_dir)
        launcher = child_process.start(own_program("holdfast", "run", *command), environ={**environ, **own})
        before = {number: signal.signal(number, _pass_on(launcher)) for number in _PASSED_ON}
        try:
            _Chaos(plan, folder, run_dir, launcher).watch()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        code = launcher.returncode
        return 128 - code if code < 0 else code


def _pass_on(launcher: subprocess.Popen[bytes]) -> Any:
    def handler(number: int, _frame: FrameType | None) -> None:
        launcher.send_signal(number)

    return handler


class _Chaos:
    def __init__(self, plan: Plan, folder: Path, run_dir: Path, launcher: subprocess.Popen[bytes]) -> None:
        self._plan = plan
        self._folder = folder
        self._status_file = run_dir / STATUS_FILE
        self._launcher = launcher
        self._trace = Trace(folder / TRACE_FILE)
        self._lines = JsonLines(folder / INJECTIONS_FILE)
        self._injections: list[Injection] = []
        self._incidents: dict[tuple[int, int], dict[str, Any]] = {}
        self._random_faults = plan.random_faults()
        self._next: RandomFault | None = next(self._random_faults, None)
        self._number = len(plan.faults)
        self._ran: float | None = None
        self._injected_at: float | None = None  # the last time, or when training began
        self._resting: list[tuple[float, int]] = []

    def watch(self) -> None:
        """Inject until the launcher ends, then print the table."""
        self._print(f"seed {self._plan.seed}, {len(self._plan.faults)} faults at steps")
        while self._launcher.poll() is None:
            self._poll()
            self._inject_if_due()
            self._wake()
            time.sleep(_POLL_SECONDS)
        self._poll()
        found = costs(self._injections, self._trace.records, list(self._incidents.values()))
        text = summary(found, seed=self._plan.seed, uses_holdfast=bool(self._trace.records))
        sys.stderr.write(f"\n{text}\n")

    def _poll(self) -> None:
        """Read new marks and print injected faults."""
        self._trace.read()
        status = self._status()
        for one in status.get("incidents", []):
            self._incidents[one["generation"], one["attempt"]] = one
        for line in self._lines.read_new():
            injection = Injection(**line)  # type: ignore[arg-type]
            self._injections.append(injection)
            self._print(
                f"{injection.kind} to rank {injection.rank} (pid {injection.pid}) after step {injection.step}"
            )
            self._rest(injection)
        if self._ran is None and status.get("phase") == str(Phase.RUNNING):
            self._ran = time.monotonic()
        if self._injected_at is None and self._trains():
            self._injected_at = time.monotonic()

    def _trains(self) -> bool:
        without_steps = self._ran is not None and time.monotonic() - self._ran > _FIRST_FAULT_SECONDS
        return bool(self._trace.records) or without_steps

    def _status(self) -> dict[str, Any]:
        try:
            document: dict[str, Any] = json.loads(self._status_file.read_bytes())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return document

    def _inject_if_due(self) -> None:
        """Inject the next fault if it is due. Between two worlds there is no rank, so the faults wait."""
        if self._injected_at is None or self._next is None or time.monotonic() < self._injected_at + self._next.after:
            return
        ranks = [one for one in self._status().get("ranks", []) if one.get("pid")]
        if not ranks:
            return
        victim = ranks[int(self._next.pick * len(ranks))]
        self._number += 1
        self._inject(self._next.kind, rank=int(victim["rank"]), pid=int(victim["pid"]))
        self._injected_at, self._next = time.monotonic(), next(self._random_faults, None)

    def _inject(self, kind: Kind, *, rank: int, pid: int) -> None:
        fault = replace(self._plan.of(kind), number=self._number)
        if kind.in_script:
            temporary = self._folder / f".order-{pid}"
            temporary.write_text(json.dumps(fault.to_json()))
            temporary.rename(order_file(self._folder, pid))
            return
        injection = Injection.of(self._number, str(kind), rank=rank, pid=pid, step=self._trace.step)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if kind is Kind.KILL else signal.SIGSTOP)
            injection.append_to(self._folder / INJECTIONS_FILE)

    def _rest(self, injection: Injection) -> None:
        """Note a process whose stop has a duration, to continue it later."""
        fault = next((one for one in self._plan.faults if one.number == injection.number), None)
        if injection.kind == Kind.STOP and fault is not None and fault.seconds is not None:
            with contextlib.suppress(ProcessLookupError):
                self._resting.append((injection.time + fault.seconds, os.pidfd_open(injection.pid)))

    def _wake(self) -> None:
        due = [one for one in self._resting if one[0] <= time.monotonic()]
        for one in due:
            self._resting.remove(one)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(one[1], signal.SIGCONT)
            os.close(one[1])

    @staticmethod
    def _print(text: str) -> None:
        sys.stderr.write(f"chaos: {text}\n")
        sys.stderr.flush()
