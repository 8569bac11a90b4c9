"""The cost of a joining rank for those that train, and the memory of a warm process.

Three launchers of one rank each train on loopback. The third is killed, and a new one joins the two that continued.
The pause is the longest gap between two steps of a survivor around the growth, less its median step. The shorter
median of before and after counts, because three ranks share the machine's cores differently from two. The limit is a
plain gloo broadcast of as many bytes as the state has. It runs right after each growth while the ranks pause, between
two processes on loopback and into allocated memory.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import _bench as bench
from _recovery import contenders as c
from _recovery.observer import Line

from holdfast_testbed.ports import free_port

HERE = Path(__file__).resolve().parent
# Model → samples per rank and step, growths per session.
SIZES = {"3.7 M": 4, "29 M": 1}
COPIES = 5
STEPS = 10  # to measure a step
AROUND = 3  # steps after the growth in which the pause may be
WARM_LIMIT_MIB = 300


class Growing(c.ThreeLaunchers):
    """Three launchers, the third of which is lost and returns."""

    script = HERE / "_growth_train.py"
    size = "3.7 M"

    def launch(self, name: str, *words: str, **environ: str) -> subprocess.Popen[bytes]:
        own = {"BENCH_SIZE": self.size, "BENCH_SAMPLES": str(SIZES[self.size])}
        return super().launch(name, *words, **environ, **own)

    def grow(self) -> float:
        """Lose the third launcher, restart it, and return the seconds of the others' pause."""
        self.lose_launcher()
        self._await_steps(2, since=time.monotonic_ns())
        since = time.monotonic_ns()
        self.revive()
        self._await_steps(3, since=since)
        return pause([line for line in self.trace.steps if line.began >= since])

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Pause all ranks and the preparation of standby processes."""
        self.await_quiet()
        asked, resting = self.folder / "rest", self.folder / "resting"
        resting.unlink(missing_ok=True)
        asked.touch()
        self.wait_for(resting.exists, "ranks at rest", seconds=30)
        time.sleep(0.3)  # the others then wait for the first one that pauses
        yield
        asked.unlink()

    def _await_steps(self, world: int, *, since: int) -> None:
        def made() -> int:
            first = [line for line in self.trace.steps if line.began >= since and line.rank == 0]
            return sum(line.world.endswith(f".{world}") for line in first)

        self.wait_for(lambda: made() >= STEPS, f"{STEPS} steps of {world} ranks", seconds=120)


class GrowingLarge(Growing):
    """The same with a state of hundreds of MiB."""

    size = "29 M"


class OneRank(c.OneLauncher):
    """One launcher with one rank: the case in which a standby process shares the least memory."""

    full = 1

    def begin(self) -> None:
        self._launcher("launcher", "--nproc-per-node", "1", HOLDFAST_RUN_DIR=str(self.folder / "run-0"))


def pause(steps: Sequence[Line]) -> float:
    """Return the longest pause of a rank that trained before and after the growth, in seconds."""
    worlds = list(dict.fromkeys(line.world for line in steps))
    survivors = {line.pid for line in steps if line.world == worlds[0]}
    return max(_pause_of([line for line in steps if line.pid == pid], worlds[-1]) for pid in survivors)


def _pause_of(steps: Sequence[Line], grown: str) -> float:
    gaps = [(second.time - first.time) / 1e9 for first, second in pairwise(steps)]
    first = next(number for number, line in enumerate(steps) if line.world == grown) - 1
    usual = min(bench.median(gaps[:first]), bench.median(gaps[first + 1 :]))
    return max(gaps[first : first + AROUND]) - usual


class Copier:
    """Two processes that copy on request."""

    def __init__(self, size: str) -> None:
        meet = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": "2",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self._processes = [
            self._start({**os.environ, **meet, "RANK": str(rank), "BENCH_SIZE": size}) for rank in (0, 1)
        ]
        self.seconds()  # a warm-up

    def _start(self, environ: dict[str, str]) -> subprocess.Popen[str]:
        command = [sys.executable, str(HERE / "_growth_copy.py")]
        return subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self) -> float:
        """Return the median seconds of several copies."""
        first = self._processes[0]
        assert first.stdin is not None  # noqa: S101 - it is a pipe
        assert first.stdout is not None  # noqa: S101
        took = []
        for _ in range(COPIES):
            print(file=first.stdin, flush=True)
            took.append(float(first.stdout.readline()))
        return bench.median(took)

    def close(self) -> None:
        """End both processes."""
        for process in self._processes:
            process.communicate()


def growths(kind: type[Growing], wanted: int, trials: bench.Trials) -> None:
    """Measure this many growths in one session, with a copy after each."""
    if wanted <= 0:
        return
    copier = Copier(kind.size)
    try:
        with c.running(kind) as job:
            assert isinstance(job, Growing)  # noqa: S101 - the type of the session
            for _ in range(wanted):
                paused = job.grow()
                with job.resting():
                    copied = copier.seconds()
                trials.keep(f"{kind.size} pause", paused)
                trials.keep(f"{kind.size} copy", copied)
                said = f"{kind.size}: paused for {1000 * paused:.0f} ms, copied in {1000 * copied:.0f} ms"
                print(said, file=sys.stderr, flush=True)
    finally:
        copier.close()


def warm_mib() -> float:
    """Return the MiB that one standby process uses; shared pages count by their share."""
    with c.running(OneRank) as job:
        job.wait_for(lambda: bool(job.warm()), "a warm process", seconds=60)
        job.await_quiet()
        lines = Path(f"/proc/{job.warm()[0]}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def growth_rows(size: str, trials: bench.Trials) -> list[bench.Measurement]:
    """Return the rows of the pause, and of the pause relative to the copy."""
    pauses, copies = trials.values(f"{size} pause"), trials.values(f"{size} copy")
    if not pauses:
        return [bench.not_measured("growth", f"{size} parameters", "not in --quick")]
    what = f"{size} parameters and AdamW, two ranks grow to three: pause of the two"
    return [
        bench.measured("growth", what, pauses, "s", limit=bench.median(copies)),
        bench.measured(
            "growth", f"{what} ÷ a plain copy of the state", bench.ratios(pauses, copies), "x", target="<= 3"
        ),
    ]


def main() -> int:
    effort = bench.arguments(__doc__ or "")
    trials = bench.Trials("growth", effort)
    wanted = {
        Growing: effort.pick(quick=1, default=6, full=25),
        GrowingLarge: effort.pick(quick=0, default=4, full=25),
    }
    for kind, number in wanted.items():
        growths(kind, number - len(trials.values(f"{kind.size} pause")), trials)
    memory = trials.collect("warm", effort.pick(quick=1, default=3, full=10), warm_mib)
    what, target = "memory of a standby process, of its own (PSS)", f"<= {WARM_LIMIT_MIB}"
    rows = [row for kind in wanted for row in growth_rows(kind.size, trials)]
    return bench.finish("growth", [*rows, bench.measured("warm-memory", what, memory, "MiB", target=target)], effort)


if __name__ == "__main__":
    sys.exit(main())
