"""From a fault to the next completed step: Holdfast, torchrun and torchft, measured by one observer.

Each contender trains the same transformer of 3.7 million parameters with one thread per process. Faults are injected
from outside at random instants, or are ordered and occur in the script's loss function. A step counts when its script
has written its line. There are two workers, except for the loss of a launcher. There, Holdfast and torchft have
three, because two launchers never shrink by themselves, and each rank keeps its share of samples, as with torchft.
`--goodput` runs only the long comparison with a kill every 30 s, `--resumes` only a hundred faults of Holdfast.
"""

from __future__ import annotations

import math
import os
import random
import select
import signal
import statistics
import sys
import time
from collections.abc import Sequence

import _bench as bench
from _recovery import contenders as c
from _recovery import rows
from _recovery.book import HANGS, ROUNDS, Book, Contest, Trial
from _recovery.observer import latest, lost_steps, resumed

WARM_UP = "warm-up "
KILL_EVERY = 30.0
VICTIM = 1


# Trials


def session(contest: Contest, faults: Sequence[str], book: Book) -> None:
    """Run jobs until each fault was injected. If a job does not recover from a fault, the next one starts."""
    left, starts = list(faults), 0
    while left:
        starts += 1
        if starts > len(faults) + 2:
            raise SystemExit(f"{contest.key}: a job does not even start; out of patience")
        try:
            with c.running(contest.job) as job:
                job.await_quiet()
                one_job(contest, job, left, book)
        except c.TrialFailedError as error:
            print(error, file=sys.stderr)


def one_job(contest: Contest, job: c.Job, left: list[str], book: Book) -> None:
    """Inject the faults of the list until it is empty or the job does not recover."""
    while left:
        fault = left.pop(0)
        victim = job.pid(VICTIM)
        trial = hurt(job, fault.removeprefix(WARM_UP), contest.patience)
        say(contest, fault, trial)
        if not fault.startswith(WARM_UP):
            book.keep(contest, fault, trial)
        if trial.lost:
            print(job.tail(), file=sys.stderr)
        if not trial.resumed:
            return
        job.end_victim(victim)
        recover(job)
    look_back(contest, job, book)


def hurt(job: c.Job, fault: str, patience: float) -> Trial:
    """Inject one fault, and wait for the step after it."""
    time.sleep(random.uniform(0.0, 0.3))  # noqa: S311 - at any moment of a step
    pid = job.pid(VICTIM)
    watch = os.pidfd_open(pid)
    try:
        fault_time = inject(job, fault, pid)
        seen: list[int] = []

        def over() -> bool:
            if not seen and select.select([watch], [], [], 0)[0]:
                seen.append(time.monotonic_ns())
            return resumed(job.trace.lines, fault=fault_time) is not None

        try:
            job.wait_for(over, "a step after the fault", seconds=patience)
        except c.TrialFailedError:
            return Trial(seconds=patience, resumed=False, detected=detection(job, fault, seen, fault_time))
    finally:
        os.close(watch)
    found = resumed(job.trace.lines, fault=fault_time)
    assert found is not None  # noqa: S101 - the wait ends with it
    return Trial(
        seconds=(found.time - fault_time) / 1e9,
        resumed=True,
        lost=lost_steps(job.trace.lines, fault=fault_time),
        detected=detection(job, fault, seen, fault_time),
    )


def inject(job: c.Job, fault: str, pid: int) -> int:
    """Inject the fault. Return its time in nanoseconds of the monotonic clock."""
    now = time.monotonic_ns()
    if fault == "kill":
        os.kill(pid, signal.SIGKILL)
    elif fault == "stop":
        os.kill(pid, signal.SIGSTOP)
    elif fault == "launcher":
        job.lose_launcher()
    else:
        job.order(VICTIM, fault)
        job.wait_for(lambda: obeyed(job, fault, now) is not None, f"the order {fault}", seconds=20)
        now = obeyed(job, fault, now) or now
    return now


def obeyed(job: c.Job, order: str, since: int) -> int | None:
    """Return when a rank reported that it executes the order."""
    return next((line.time for line in job.trace.lines if line.what == order and line.time > since), None)


def detection(job: c.Job, fault: str, seen: Sequence[int], fault_time: int) -> float:
    """Return the seconds until detection. Ranks in mismatched collectives are not killed; they are asked to leave."""
    if fault == "mismatch":
        freed = obeyed(job, "freed", fault_time)
        seen = [freed] if freed else []
    return (seen[0] - fault_time) / 1e9 if seen else math.nan


def recover(job: c.Job) -> None:
    """Restore a full world, and give it time to prepare for the next fault."""
    since = time.monotonic_ns()
    job.revive()
    job.await_healthy(since=since)
    job.await_quiet()


def look_back(contest: Contest, job: c.Job, book: Book) -> None:
    """Record, at the end of a session, the step time and whether every sample was seen exactly once."""
    job.trace.read()
    took = [(line.time - line.began) / 1e9 for line in job.trace.steps]
    book.note(f"{contest.key} step", statistics.median(took))
    if isinstance(job, c.OneLauncher):
        for phases in job.recoveries():
            told = ", ".join(f"{name} {1000 * seconds:.0f}" for name, seconds in phases.items())
            print(f"{contest.key:16} the launcher's own account, ms: {told}", file=sys.stderr, flush=True)
        job.order(0, "audit")
        job.wait_for(lambda: any(line.what == "audit" for line in job.trace.lines), "an audit", seconds=20)
        book.note("ours audit", next(float(line.step) for line in job.trace.lines if line.what == "audit"))


def say(contest: Contest, fault: str, trial: Trial) -> None:
    """Print progress."""
    took = f"{trial.seconds:.2f} s" if trial.resumed else "not resumed"
    detected = "" if math.isnan(trial.detected) or fault == "kill" else f", victim ended after {trial.detected:.2f} s"
    print(f"{contest.key:16} {fault:14} {took}, {trial.lost} steps lost{detected}", file=sys.stderr, flush=True)


def contests(effort: bench.Effort, book: Book) -> list[Contest]:
    """Return the contests of this run."""
    if effort.quick:
        return [
            Contest(key="ours", job=c.OneLauncher, faults=("kill",), warm_up=False),
            Contest(key="ours pods", job=c.ThreeLaunchers, faults=("launcher",), warm_up=False),
            Contest(key="torchrun", job=c.Torchrun, faults=("kill",), warm_up=False),
        ]
    five, two = ("kill",) * 5, ("kill",) * 2
    found = [
        Contest(key="ours", job=c.OneLauncher, faults=(*five, *HANGS)),
        Contest(key="ours pods", job=c.ThreeLaunchers, faults=("launcher", "mismatch") * 3),
        Contest(key="torchrun", job=c.Torchrun, faults=five),
        Contest(key="torchrun stock", job=c.StockTorchrun, faults=two, patience=15.0, warm_up=False),
    ]
    if not c.no_warm_option():
        found.append(Contest(key="ours zygote", job=c.OneLauncherNoWarm, faults=five))
    if not book.without_torchft:
        found += [
            Contest(key="torchft", job=c.Torchft, faults=two, warm_up=False),
            Contest(key="torchft tuned", job=c.TunedTorchft, faults=five),
            Contest(key="torchft three", job=c.ThreeReplicas, faults=two, warm_up=False),
            Contest(key="torchft three tuned", job=c.TunedThreeReplicas, faults=("kill",) * 3),
            Contest(
                key="torchft hang", job=c.Torchft, faults=("stop", "sleep"), patience=90.0, every=4, warm_up=False
            ),
        ]
    return found


def trials(effort: bench.Effort, book: Book) -> None:
    """Run all rounds, in random order per round. A contender's first fault is a warm-up that is dropped."""
    taking_part = contests(effort, book)
    for book.round in range(effort.pick(quick=1, default=2, full=ROUNDS)):
        if book.in_round(book.round, "whole"):
            continue
        for contest in random.sample(taking_part, len(taking_part)):
            if book.round % contest.every == 0:
                warm = (f"{WARM_UP}{contest.faults[0]}",) if book.round == 0 and contest.warm_up else ()
                session(contest, warm + contest.faults, book)
        book.note("whole", 1.0)


# Goodput


def goodput(effort: bench.Effort, book: Book) -> None:
    """Count the steps in equal times with a kill every 30 s and without one."""
    window = float(effort.pick(quick=10, default=60, full=600))
    kinds: dict[str, type[c.Job]] = {"ours": c.OneLauncher, "torchrun": c.TorchrunEveryTen}
    if not book.without_torchft:
        kinds["torchft"] = c.TunedTorchft
    for book.round in range(effort.pick(quick=1, default=1, full=3)):
        for key in random.sample(sorted(kinds), len(kinds)):
            if book.in_round(book.round, f"{key} goodput"):
                continue
            made: dict[bool, int] = {}
            for disturbed in random.sample([False, True], 2):
                made[disturbed] = steps_in(kinds[key], window, disturbed=disturbed)
            book.note(f"{key} goodput", made[True] / made[False])
            told = f"{key:16} goodput {made[True]} / {made[False]} steps in {window:.0f} s"
            print(told, file=sys.stderr, flush=True)


def steps_in(kind: type[c.Job], window: float, *, disturbed: bool) -> int:
    """Return the steps that a job trains in this many seconds."""
    with c.running(kind) as job:
        job.await_quiet()
        first, started = job.trace.step, time.monotonic()
        end, kill_at = started + window, started + min(KILL_EVERY, window) / 2
        while (now := time.monotonic()) < end:
            job.trace.read()
            if disturbed and now >= kill_at and VICTIM in latest(job.trace.lines):
                os.kill(job.pid(VICTIM), signal.SIGKILL)
                kill_at += KILL_EVERY
            job.revive()
            time.sleep(0.05)
        job.trace.read()
        return job.trace.step - first


# Resumption


def resumes(effort: bench.Effort, book: Book) -> None:
    """Inject faults of all kinds into Holdfast only. Other load on the machine does not matter."""
    sessions = [
        Contest(key="ours", job=c.OneLauncher, faults=("kill", "kill", *HANGS) * 2),
        Contest(key="ours pods", job=c.ThreeLaunchers, faults=("launcher", "launcher", "mismatch", "launcher") * 2),
    ]
    for book.round in range(effort.pick(quick=1, default=5, full=ROUNDS)):
        for contest in sessions:
            session(contest, contest.faults, book)


def main() -> int:
    flags = {
        "--goodput": "only steps made with a kill every 30 s, against those without one",
        "--resumes": "only whether ours resumes, after a hundred faults",
    }
    effort = bench.arguments(__doc__ or "", flags)
    book = Book(effort)
    if "--resumes" in effort.flags:
        resumes(effort, book)
        return bench.finish("recovery-resumes", [rows.resumed(book), *rows.kept(book)], effort)
    if effort.flags:
        goodput(effort, book)
        return bench.finish("recovery-goodput", rows.goodput(book), effort)
    trials(effort, book)
    if effort.full:
        goodput(effort, book)
    return bench.finish("recovery", rows.all_of(book), effort)


if __name__ == "__main__":
    sys.exit(main())
