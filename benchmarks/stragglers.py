"""An hour with slow ranks, three times as slow as the others: none may be reported as hung (bar recovery-5).

Two jobs train at the same time. One launcher with two ranks trains at a pace with the shortest possible deadline.
Three launchers with a rank each train at a pace whose deadline depends on the median step. In a quarter of the time
one rank is slow in each of twenty steps, and otherwise in one step of ten. Computing is a sleep, so almost no CPU is
used. Other load on the machine only makes the test stricter.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import _bench as bench
from _recovery import contenders as c

HERE = Path(__file__).resolve().parent
TIMES = 3.0
LOOK_SECONDS = 10.0
TELL_SECONDS = 300.0


class OneLauncher(c.OneLauncher):
    """One launcher with two ranks."""

    script = HERE / "_recovery" / "with_stragglers.py"
    what = "one launcher with two ranks"
    pace = 0.18

    def launch(self, name: str, *words: str, **environ: str) -> subprocess.Popen[bytes]:
        return super().launch(name, *words, **environ, BENCH_PACE=str(self.pace), BENCH_TIMES=str(TIMES))

    def failures(self) -> list[str]:
        """Return each failure in a launcher's timeline."""
        paths = sorted(self.folder.glob("run-*/timeline.jsonl*"))
        lines = [line for path in paths for line in path.read_text().splitlines()]
        return [line for line in lines if json.loads(line)["kind"] == "failure"]


class ThreeLaunchers(OneLauncher, c.ThreeLaunchers):
    """Three launchers with a rank each, which decide by each other's messages."""

    what = "three launchers with a rank each"
    pace = 0.4


def train(jobs: list[OneLauncher], seconds: float) -> float:
    """Train until the time is over or a job reports a failure. Return the seconds."""
    began = told = time.monotonic()
    while (now := time.monotonic()) - began < seconds and not any(job.failures() for job in jobs):
        if now - told >= TELL_SECONDS:
            told = now
            steps = ", ".join(f"{job.what} at step {job.trace.step}" for job in jobs)
            print(f"{(now - began) / 60:.0f} min: no rank failed; {steps}", file=sys.stderr, flush=True)
        time.sleep(min(LOOK_SECONDS, seconds))
        for job in jobs:
            job.trace.read()
    return time.monotonic() - began


def rows(job: OneLauncher, minutes: float) -> list[bench.Measurement]:
    """Return the rows of failures and of slowness."""
    failures, what = job.failures(), f"{job.what}, stragglers of 3 ×"
    for line in failures:
        print(f"{job.what}: {line}\n{job.tail()}", file=sys.stderr, flush=True)
    took = [(line.time - line.began) / 1e9 for line in job.trace.steps]
    usual = statistics.median(took)
    slow = [second / usual for second in took if second > 2 * usual]
    return [
        bench.measured("recovery-5", f"{what}: failures in {minutes:.0f} min", [len(failures)], "", target="<= 0"),
        bench.measured("recovery-5", f"{what}: a step that had one ÷ the median step", slow or [0.0], "x"),
    ]


def main() -> int:
    effort = bench.arguments(__doc__ or "")
    seconds = effort.pick(quick=20, default=3600, full=4 * 3600)
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(c.running(kind)) for kind in (OneLauncher, ThreeLaunchers)]
        straggling = [job for job in jobs if isinstance(job, OneLauncher)]
        minutes = train(straggling, seconds) / 60
        found = [row for job in straggling for row in rows(job, minutes)]
    return bench.finish("stragglers", found, effort)


if __name__ == "__main__":
    sys.exit(main())
