"""The operator under test, and its cost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast_testbed.fakes.operator_process import MODULE, OperatorProcess

BENCHMARKS = Path(__file__).resolve().parents[1]
TICKS = os.sysconf("SC_CLK_TCK")
READY_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The resources that a process used within a time."""

    cores: float
    rss_mib: float


class Operator(OperatorProcess):
    """The operator's process. With a profile, samples of all its threads are written to that file at its end."""

    def __init__(self, kubeconfig: Path, folder: Path, name: str, profile: Path | None = None) -> None:
        # Without its pod's name, each start is a new candidate for the Lease, as after the loss of a pod. Full lists
        # are three times as frequent as by default, so that some occur during a measurement.
        super().__init__(kubeconfig, folder, MODULE, name=name, HOLDFAST_POD_NAME="", HOLDFAST_RELIST_SECONDS="60")
        self._profile, self._starts = profile, 0
        if profile is not None:
            self.environment["PYTHONPATH"] += f":{BENCHMARKS}"

    def start(self) -> None:
        """Start it; returns at once."""
        self._starts += 1
        if self._profile is not None:
            self.program = ("-m", "_fleet.profiled", f"{self._profile}.{self._starts}")
        super().start()

    def end(self) -> None:
        """Send SIGKILL; with a profile SIGTERM, so that the profile is written."""
        if self.alive() and self._profile is None:
            self.kill()
        elif self.alive():
            self.stop()

    def check(self) -> None:
        """Raise an error if it has exited by itself."""
        if not self.alive():
            raise SystemExit(f"the operator ended: {self.log()[-3000:]}")

    def until(self, condition: Callable[[], bool], what: str, every: float = 0.5) -> None:
        """Wait until it has caused a condition."""
        end = time.monotonic() + READY_SECONDS
        while not condition():
            self.check()
            if time.monotonic() > end:
                raise SystemExit(f"not within {READY_SECONDS:.0f} s: {what}; see {self._log}")
            time.sleep(every)

    def converged(self, jobs: int) -> bool:
        """Return whether it has made a pass over each of this many jobs."""
        if self.page("/readyz") is None:
            return False
        lines = (self.page("/metrics") or "").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("holdfast_jobs{")) >= jobs

    def cpu_seconds(self) -> float:
        """Return the CPU time since its start, in seconds."""
        fields = self._proc("stat").rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory(self, field: str = "VmRSS") -> float:
        """Return its memory in MiB: ``VmRSS`` now, ``VmHWM`` at most."""
        line = next(line for line in self._proc("status").splitlines() if line.startswith(f"{field}:"))
        return int(line.split()[1]) / 1024

    def cost(self, seconds: float) -> Cost:
        """Return what it uses during the next seconds."""
        before, began = self.cpu_seconds(), time.monotonic()
        time.sleep(seconds)
        return Cost(
            cores=(self.cpu_seconds() - before) / (time.monotonic() - began),
            rss_mib=self.memory(),
        )

    def _proc(self, name: str) -> str:
        return Path(f"/proc/{self.pid}/{name}").read_text()
